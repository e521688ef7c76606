"""Readers of rows: files, hub datasets, images, and the demo corpora."""
