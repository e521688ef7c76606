"""Evaluation: loss and generated texts of the evaluation split, ROUGE, baselines."""
