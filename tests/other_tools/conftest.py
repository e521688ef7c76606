"""Tools of others that read an export: lm-eval and CTranslate2, each as its command line is typed, offline."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

TRANSFORMERS_4 = Path(sys.prefix) / "transformers4"
"""Where `make test-transformers4` puts it."""
absent = [
    (module, name) for module, name in (("lm_eval", "lm-eval"), ("ctranslate2", "ctranslate2")) if find_spec(module) is None
]
if not TRANSFORMERS_4.is_dir():
    absent.append(("transformers4", "transformers4"))
if absent:
    collect_ignore = [f"test_{module}.py" for module, _ in absent]
    targets = ", ".join(f"make test-{name}" for _, name in absent)
    warnings.warn(f"tests/other_tools is left out where the tool is not installed: {targets} runs it", stacklevel=1)


def run_command(name: str, *words: object, cwd: Path) -> str:
    """What a command of this environment prints."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, words)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cwd / "cache"), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
