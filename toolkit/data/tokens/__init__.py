"""From text rows to tokenized rows: prompts, chat templates, label masks, cuts, and the token cache."""
