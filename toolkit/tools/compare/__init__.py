"""`python -m toolkit compare`: one recipe under several presets."""
