"""From a command line to an `Accelerator`: the accelerate YAML, the environment of a launch, the run folder."""
