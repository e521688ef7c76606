"""Memory plans: what a run will need on each rank, computed without a GPU (`python -m toolkit plan`)."""
