"""The wheel project of a new backend, written from templates."""
