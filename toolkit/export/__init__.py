"""Hugging Face folders of a trained model, each proven by loading it again."""
