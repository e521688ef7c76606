"""Evaluation: loss and generated texts on the evaluation split, ROUGE, baselines."""
