"""`python -m toolkit verify`: what the toolkit promises, proven by running it on the user's own box, with the user's model.

verify.py        in the user's process: launches a few short runs of the recipe, compares, prints the table
runs.py          which runs, and what each of them is for
watched_run.py   in every rank: the recipe as it stands, watched from outside
rank_probes.py   in it: what dropout drops, what is generated
records.py       what a watched run has left
checks.py        what is compared and with which tolerance
updates.py       AdamW written out, and masks of dropout
exports.py       exports, loaded by plain transformers and peft
"""

EXPORT, LEAVE = "export", "leave"
"""How a watched run ends: with the recipe's export, or after the last step."""
PROBED_STEPS = (2, 3)
"""In which the masks of dropout are compared."""
