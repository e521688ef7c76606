"""Exports a trained model as Hugging Face folders, each verified by reloading it."""
