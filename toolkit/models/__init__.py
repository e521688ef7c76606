"""Models: their config, weights (the full model, or each rank's shard of it), frozen parameters and LoRA adapters."""
