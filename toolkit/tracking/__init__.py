"""Records and shows a run: metrics.jsonl, progress, trackers, memory, curves, and the summary at its end."""
