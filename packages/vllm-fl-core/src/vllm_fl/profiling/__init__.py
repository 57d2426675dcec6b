"""What a model's time is spent on: torch.profiler inside vLLM's workers, classified by origin."""
