"""Fine-tuning on top of Accelerate: one loop, an exact batch plan, FSDP from a YAML file, sharded checkpoints."""

__version__ = "0.1.0"
