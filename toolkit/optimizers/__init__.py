"""The optimizers by name. Another one is a file like `adamw.py`, an entry here, and a base of `OptimConfig`.

The second one makes `OptimConfig.name` a field, and types this mapping. A checkpoint without a setting resumes only where the
setting's default is 0 or None: so `name` is None for AdamW. The bases of `OptimConfig` are in the order AdamW, new: a field that
both have keeps AdamW's default and help.
"""

from toolkit.optimizers.adamw import AdamW

OPTIMIZERS = {"adamw": AdamW}
