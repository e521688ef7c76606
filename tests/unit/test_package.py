"""What `import toolkit` offers, what it does not import, and where it reads the environment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import toolkit

LISTED = """
import sys, toolkit
assert {*toolkit.__all__} <= {*dir(toolkit)}, dir(toolkit)
print(*(name for name in ("torch", "transformers", "datasets", "jsonargparse") if name in sys.modules))
"""


def test_the_public_names_are_listed_and_imported_at_their_first_use() -> None:
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "", listed.stdout
    for name in toolkit.__all__:
        assert getattr(toolkit, name).__name__ == name
    assert toolkit.finetune.__module__ == "toolkit.training.finetune"


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(toolkit.__file__).parent / "py.typed").exists()


def test_two_files_read_the_environment() -> None:
    root = Path(toolkit.__file__).parent
    reads = re.compile(r"\bos\.(environ|getenv|putenv)|from os import .*env")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))}
    assert found == {"variables.py", "launch/environment.py"}
