"""What a run would need of each rank, told before there is a GPU: `python -m toolkit plan`."""
