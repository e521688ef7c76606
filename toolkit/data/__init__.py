"""The way from sources to micro-batches: rows of text, tokenized rows, the batch plan, collation."""
