"""From a command line to an `Accelerator`: the accelerate YAML, the launch environment, the run folder."""
