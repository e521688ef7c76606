"""Checkpoints: saved asynchronously, valid or absent, found, ranked, and loaded on any number of ranks."""
