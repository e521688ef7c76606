"""Rows of tokens: prompts, chat templates, what counts as a label, what is cut, and the cache of tokens."""
