"""What `import toolkit` offers, what it does not import, and where it reads the environment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import toolkit
from tests.support.launch import REPOSITORY

LISTED = """
import sys, toolkit
assert {*toolkit.__all__} <= {*dir(toolkit)}, dir(toolkit)
print(*(name for name in ("torch", "transformers", "datasets", "jsonargparse") if name in sys.modules))
"""

ELSEWHERE = """
import os, runpy, signal, sys
_, sys.platform, *sys.argv = sys.argv
for place, name in ((os, "sched_getaffinity"), (os, "pidfd_open"), (signal, "SIGHUP")):
    delattr(place, name)
sys.modules["fcntl"] = sys.modules["resource"] = None  # their import fails
(runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("platform", "system"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")])
@pytest.mark.parametrize("program", ["toolkit train run.yaml", "recipes/llm.py --help", "toolkit.training.finetune"])
def test_another_system_than_linux_gets_one_sentence(program: str, platform: str, system: str) -> None:
    words = [sys.executable, "-c", ELSEWHERE, platform, *program.split()]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    sentence = f"error: the toolkit needs Linux, and this is {system}: use a Linux machine, a container, or WSL 2\n"
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", sentence, 2)


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == toolkit.__version__


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
