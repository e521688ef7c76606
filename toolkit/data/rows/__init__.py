"""Rows of text: reading them from their source, checking, splitting and caching them."""
