"""The operators of the catalogue in plain PyTorch."""
