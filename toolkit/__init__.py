"""Fine-tuning on top of Accelerate: one loop, an exact batch plan, FSDP from a YAML file, sharded checkpoints."""

from toolkit.launch.import_noise import filter_import_noise

__version__ = "0.1.0"

filter_import_noise()  # here, because every import of ours runs this file before it imports transformers
