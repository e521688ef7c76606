"""The training loop, and everything around it: setup, optimizer, guards, checks, the end."""
