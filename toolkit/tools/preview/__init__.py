"""`python -m toolkit preview`: shows the rows of a run as the model will see them, in the terminal or as a page."""
