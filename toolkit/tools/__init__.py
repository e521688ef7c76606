"""`python -m toolkit COMMAND`: one file or folder per command."""
