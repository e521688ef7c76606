"""The kinds of task, one file each: what `toolkit/config/task.py` asks, answered from all layers."""
