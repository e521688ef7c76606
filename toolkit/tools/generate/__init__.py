"""`python -m toolkit generate`: summaries or answers of a model that a run has exported."""
