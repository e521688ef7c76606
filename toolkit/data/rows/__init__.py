"""Rows of text: checked, split for training and evaluation, cached."""
