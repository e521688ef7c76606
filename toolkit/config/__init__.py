"""Every setting: the dataclasses of a run YAML, how they are read from YAML and flags, and the errors for wrong ones."""
