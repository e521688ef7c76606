"""Readers of rows: files, hub datasets, and functions of one's own."""
