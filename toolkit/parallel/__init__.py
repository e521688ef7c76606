"""Sharding: what FSDP wraps and gathers, float8, and the chunked loss that runs inside a sharded model."""
