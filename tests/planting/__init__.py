"""Faults that are planted from outside into the toolkit or an installed library, and who must catch them.

plant.py            plants a fault by its name, in this process and in every rank that `tests.support.launch` starts from it
update_faults.py    faults of a step: dropout, loss, gradients, clipping, AdamW, learning rate
changed_lines.py    one changed line each, in a table
state_faults.py     faults of loading, sharding, saving and resuming, of evaluation and of adapters
field_faults.py     bugs of other trainers
faults.py           the list: name, patch, the test and the checks of `verify` that must catch it
"""
