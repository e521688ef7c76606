"""Records and shows a run: metrics.jsonl, progress, trackers, memory, and the summary at its end."""
