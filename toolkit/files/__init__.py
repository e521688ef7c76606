"""How this project reads and writes files: JSON lines, modes that follow the umask, writes that survive a crash."""
