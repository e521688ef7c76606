"""Sharding: what FSDP wraps and gathers, float8, and the loss by chunks that runs inside a sharded model."""
