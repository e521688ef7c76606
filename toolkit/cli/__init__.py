"""`python -m toolkit COMMAND`: one file or folder a command."""
