"""What `import toolkit` offers, what it does not import, and where it reads the environment."""

import ast
import enum
import logging
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


@pytest.mark.parametrize(
    ("program", "platform", "system"),
    [
        *((program, "darwin", "macOS") for program in ("toolkit train run.yaml", "recipes/llm.py --help")),
        *(("toolkit.training.finetune", *named) for named in (("win32", "Windows"), ("freebsd14", "freebsd14"))),
    ],
)
def test_another_system_than_linux_gets_one_sentence(program, platform, system):
    words = [sys.executable, "-c", ELSEWHERE, platform, *program.split()]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    sentence = f"error: the toolkit needs Linux, and this is {system}: use a Linux machine, a container, or WSL 2\n"
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", sentence, 2)


def test_the_public_names_are_listed_and_imported_at_their_first_use():
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "", listed.stdout
    for name in toolkit.__all__:
        assert getattr(toolkit, name).__name__ == name
    assert toolkit.finetune.__module__ == "toolkit.training.finetune"
    assert (Path(toolkit.__file__).parent / "py.typed").exists(), "its types are used"
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == toolkit.__version__


def test_two_files_read_the_environment():
    root = Path(toolkit.__file__).parent
    reads = re.compile(r"\bos\.(environ|getenv|putenv)|from os import .*env")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))}
    assert found == {"variables.py", "launch/environment.py"}


def test_lower_folders_import_the_interface_of_objectives_for_type_checkers_only():
    """import-linter cannot tell: its contracts leave these imports out."""
    root = Path(toolkit.__file__).parent
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] in ("objectives", "training", "tools"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = [
            node
            for block in tree.body
            if isinstance(block, ast.If)
            for node in block.body
            if "TYPE_CHECKING" in ast.unparse(block.test)
        ]
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("toolkit.objectives")
        ]
        assert all(node in for_types for node in found), path


class OfAnotherLibrary(enum.Enum):
    FIRST = 1


@pytest.mark.parametrize(
    ("logger", "message", "arguments"),
    [
        ("torchao", "Failed to load the config: no such file", ()),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version", ()),
        ("torch.utils._pytree", "something else", ()),
        ("torch.utils._pytree", "%s is an Enum subclass. Calling register_constant() on it is deprecated", (OfAnotherLibrary,)),
    ],
)
def test_what_torchao_prints_at_its_import_is_left_out_and_other_messages_of_its_loggers_pass(logger, message, arguments):
    record = logging.LogRecord(logger, logging.WARNING, __file__, 1, message, arguments, None)
    assert logging.getLogger(logger).filters and logging.getLogger(logger).filter(record)
    if message == "something else":
        words = [sys.executable, "-c", "import toolkit.errors, torchao"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
        assert (done.stdout, done.stderr) == ("", "")
