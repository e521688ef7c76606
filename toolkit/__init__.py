"""Fine-tuning on top of Accelerate: one loop, an exact batch plan, FSDP from a YAML file, sharded checkpoints.

In Python: `from toolkit import finetune, load_config`, see docs/python_api.md.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    # Every import of ours runs this file first. Later ones fail: toolkit.errors on Windows, the start of a run on macOS.
    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    print(f"error: the toolkit needs Linux, and this is {system}: use a Linux machine, a container, or WSL 2", file=sys.stderr)
    raise SystemExit(2)

import logging
import re
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.private import ENUM_OF_TORCHAO, NOT_LOADED_BY_TORCHAO

if TYPE_CHECKING:
    from toolkit.config.python import load_config
    from toolkit.errors import UserError
    from toolkit.evaluation.metrics import on_rows
    from toolkit.training.finetune import Result, finetune
    from toolkit.training.user_functions import EvalMetrics, StepInfo

__version__ = "0.1.0"

__all__ = ["EvalMetrics", "Result", "StepInfo", "UserError", "finetune", "load_config", "on_rows"]

_MODULES = {
    "EvalMetrics": "toolkit.training.user_functions",
    "Result": "toolkit.training.finetune",
    "StepInfo": "toolkit.training.user_functions",
    "UserError": "toolkit.errors",
    "finetune": "toolkit.training.finetune",
    "load_config": "toolkit.config.python",
    "on_rows": "toolkit.evaluation.metrics",
}
"""Where public names live. They are imported at their first use: torch and its like take seconds."""

# transformers imports torchao if it is installed, which would print four lines on each rank: about shared libraries of formats
# that are not used here, and about its enums (until pytorch/ao#4848); from Python 3.12 on, at its first import, a fifth about an
# escape. Every import of ours runs this file first.
logging.getLogger("torchao").addFilter(lambda record: not re.match(NOT_LOADED_BY_TORCHAO, record.getMessage()))
warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*/torchao/")
logging.getLogger("torch.utils._pytree").addFilter(lambda record: _is_not_of_torchao(record))


def _is_not_of_torchao(record: Any) -> bool:
    return ENUM_OF_TORCHAO not in str(record.msg) or not record.args[0].__module__.startswith("torchao.")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
