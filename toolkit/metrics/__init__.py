"""What generated summaries are measured with: ROUGE, and the baselines it is read against."""
