"""What is replaced inside transformers' models, one file each: what it replaces, why, and until when."""
