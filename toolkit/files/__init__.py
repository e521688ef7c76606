"""Files as this project reads and writes them: JSON lines, modes that follow the umask, writes that a crash leaves whole."""
