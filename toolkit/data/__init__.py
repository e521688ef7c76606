"""From sources to micro-batches: rows of text, token examples, the batch plan, collation."""
