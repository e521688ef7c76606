"""What the tests of bad input share: a case as data, how it is run, and the one sentence that must be printed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.launch import TIMEOUT_S, LaunchResult, launch
from tests.support.workbench import RECIPES
from toolkit.errors import EXIT_USER_ERROR

OTHER_DATA = "in its rows or in the tokens that this version makes of them"
WAYS_OUT = "set it back to resume, or take another run.name (model.init_from starts a new run from these weights)"

Files = dict[str, str | bytes | Callable[[], bytes]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One wrong thing. `{here}` stands for the case's folder."""

    flags: str = ""
    """In place of those of the working run with the same name, or beside them; separated by blanks."""
    sentence: str
    """What is printed, whole, where `…` stands for anything."""
    files: Files = field(default_factory=dict)
    """Written into the folder beside (or over) those of the working run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Changes to the accelerate YAML."""
    preset: str = "fsdp2_cpu"


@dataclass(frozen=True, kw_only=True)
class WorkingRun:
    """What is right except for the case."""

    recipe: str
    flags: str
    files: Files

    def write(self, here: Path, files: Files) -> None:
        """Write files of a case; those of the working run are there in any case."""
        for name, content in {**self.files, **files}.items():
            made = content() if callable(content) else content
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made if isinstance(made, bytes) else made.encode())

    def launch(self, here: Path, case: Case, *, num_processes: int | None = None) -> LaunchResult:
        """The recipe on 2 ranks in the folder `here`, with what is wrong in `case`."""
        argv, script = self.arguments(here, case), RECIPES / f"{self.recipe}.py"
        return launch(
            script, argv, preset=case.preset, overrides=case.overrides, num_processes=num_processes, timeout_s=TIMEOUT_S
        )

    def arguments(self, here: Path, case: Case) -> list[str]:
        """Write the case's files; the recipe's flags for them."""
        self.write(here, case.files)
        return [fill(flag, here) for flag in [*_without(self.flags.split(), case.flags.split()), *case.flags.split()]]


def _without(flags: list[str], others: list[str]) -> list[str]:
    """Flags and their values, but those with a name among the others: a list's would add up."""
    names = {flag.partition("=")[0] for flag in others if flag.startswith("--")}
    is_dropped, kept = False, []
    for word in flags:
        is_dropped = word.partition("=")[0] in names if word.startswith("--") else is_dropped
        kept += [] if is_dropped else [word]
    return kept


def check(here: Path, case: Case, result: LaunchResult) -> None:
    """Every rank stopped by itself, and one of them said the sentence, nothing else."""
    assert result.returncodes == [EXIT_USER_ERROR] * 2, result.stderr[-3000:]
    check_said(here, case, result.stderr)


def check_said(here: Path, case: Case, stderr: str) -> None:
    """The sentence is there once, and no other."""
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, stderr
    pattern = ".+".join(re.escape(fill(part, here)) for part in f"error: {case.sentence}".split("…"))
    assert re.fullmatch(pattern, errors[0]), f"{errors[0]}\nis not\nerror: {case.sentence}"


def fill(text: str, here: Path) -> str:
    """Put the folder in."""
    return text.replace("{here}", str(here))


def model_files(config: dict[str, Any] | str, folder: str = "other", **others: str) -> Files:
    """A model folder with a `config.json`."""
    return {f"{folder}/config.json": config if isinstance(config, str) else json.dumps(config), **others}


def contents(folder: Path) -> dict[str, str]:
    """Every file's hash."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
