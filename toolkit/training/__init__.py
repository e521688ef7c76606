"""The training loop and what surrounds it: setup, optimizer, guards, checks, and the end of a run."""
