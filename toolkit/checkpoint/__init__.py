"""Checkpoints: asynchronous saves, atomic commits, choosing the newest valid or the best one, and resuming on any rank count."""
