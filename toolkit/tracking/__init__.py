"""What a run records and shows: metrics.jsonl, progress, trackers, memory, curves, the summary at its end."""
