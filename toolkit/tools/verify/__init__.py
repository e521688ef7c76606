"""`python -m toolkit verify`: proves the toolkit's guarantees by short runs on the user's machine, with the user's model."""

PROBED_STEPS = (2, 3)
"""Steps in which dropout masks are compared."""
