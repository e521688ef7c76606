"""`python -m toolkit export`: any checkpoint of a run as a Hugging Face folder."""
