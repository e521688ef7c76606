"""The optimizers by name. Another one is a file like `adamw.py`, an entry here, and a base of `OptimConfig`.

The second one makes `OptimConfig.name` a field.
"""

from toolkit.optimizers.adamw import AdamW

OPTIMIZERS = {"adamw": AdamW}
