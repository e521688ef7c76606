"""`python -m toolkit verify`: proves the toolkit's guarantees by short runs on the user's machine, with the user's model.

verify.py        in the user's process: launches a few short runs of the recipe, compares them, prints the table
runs.py          which runs there are, what each is for, and what it has left
watched_run.py   in every rank: the unchanged recipe, with its calls wrapped to record what they do
rank_probes.py   in every rank: modes of forwards, dropout masks and generated texts
proofs.py        rows of the table; the optimizer computed in fp64, and dropout masks
checks.py        what is compared, and with which tolerance
plain_checks.py  plain transformers beside the runs
plain_exports.py plain transformers and peft beside what they export
plain.py         tokens, loss, gradients, buffers and logits by plain transformers, from the text of the rows
"""

PROBED_STEPS = (2, 3)
"""Steps in which dropout masks are compared."""
EXPORTED = "preset-0"
"""The run that exports."""
