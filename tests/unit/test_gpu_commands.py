"""Every GPU command in README, docs, presets and run YAMLs fits the memory that stands beside it, by its memory plan."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launch import REPOSITORY
from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.tools.plan.plan import USABLE_SHARE
from toolkit.tools.plan.search import estimate_peak
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.plan.subject import build_subject
from toolkit.tools.plan.trace import fake_ranks

HUB_MODELS = REPOSITORY / "tests/support/model_configs"
"""The config.json of each model of the hub that a command names, as the hub has it."""
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "benchmarks/README.md"]
PAGES += sorted(path for folder in ("docs", "accelerate_configs", "recipes") for path in (REPOSITORY / folder).rglob("*.*"))
COMMAND = re.compile(r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?.*?\brecipes/(t5|llm)\.py ([^`|;)\n]*)")
"""On one line. A convnet has no memory plan: that of recipes/mnist.py has 1.2 M parameters."""
MEMORY = re.compile(r"GPUs? with (\d+) GiB")
PLACEHOLDER = re.compile(r"[A-Z_]+|/shared/.*")
"""What a reader replaces; the run YAML's value stands for it."""
WITHOUT_MEMORY = ("--data.source_column", "--data.target_column", "--run.name", "--train.max_steps")
"""Flags that change no plan: commands that differ in them alone are planned once."""


@dataclass(frozen=True)
class Command:
    """A launch of a recipe on GPUs."""

    place: str
    preset: str
    num_processes: int
    recipe: str
    flags: tuple[str, ...]
    gpu_memory_gib: int | None
    """The memory named last before the command's end in its section or comment, else first after it; None: none is named."""


def list_commands(text: str, place: str) -> Iterator[Command]:
    """The commands of a page that can be planned: neither on CPUs, nor with a run YAML that a reader writes."""
    # A section of a page or the comment of a YAML names the memory.
    for section in re.split(r"^#+ (?=[A-Z])" if place.endswith(".md") else r"^(?!#)", text, flags=re.MULTILINE):
        section = re.sub(r" *\\\n(# *)?", " ", section)
        for match in COMMAND.finditer(section):
            preset, num_processes, recipe, words = match.groups()
            flags = shlex.split(words, comments=True)
            run_yaml = flags[flags.index("--config") + 1]
            mapping = yaml.safe_load((REPOSITORY / f"accelerate_configs/{preset}.yaml").read_text())
            if mapping["use_cpu"] or "/" not in run_yaml:
                continue
            named = [*reversed(MEMORY.findall(section[: match.end()])), *MEMORY.findall(section[match.end() :])]
            num, memory = int(num_processes or mapping["num_processes"]), int(named[0]) if named else None
            yield Command(f"{place}: {preset}", preset, num, recipe, tuple(flags), memory)


def plan_bytes(command: Command) -> int:
    """A rank's peak in the command's own micro-batch."""
    given = dict(zip(command.flags[::2], command.flags[1::2], strict=True))
    named = {name: value for name, value in given.items() if name not in WITHOUT_MEMORY and not PLACEHOLDER.fullmatch(value)}
    named["--data.files"] = "rows"
    config: Any = load_config(LLMConfig if command.recipe == "llm" else SummarizationConfig, _as_flags(named))
    named["--model.name_or_path"] = config.model.name_or_path
    preset = REPOSITORY / f"accelerate_configs/{command.preset}.yaml"
    strategy = load_strategy(preset, command.num_processes, command.gpu_memory_gib)
    # Compiled blocks and float8 are planned as plain ones.
    strategy = dataclasses.replace(strategy, is_compiled=False, is_float8=False)
    return _plan_bytes(strategy, command.recipe, tuple(sorted(named.items())))


@functools.cache
def _plan_bytes(strategy: Strategy, recipe: str, flags: tuple[tuple[str, str], ...]) -> int:
    named = dict(flags)
    model = Path(named.pop("--model.name_or_path"))
    subject = build_subject(str(model if model.is_dir() else HUB_MODELS / model), strategy, _as_flags(named), recipe)
    with fake_ranks(strategy.num_processes):
        return estimate_peak(subject, strategy, subject.config.train.micro_batch_size_rows)


def _as_flags(named: dict[str, str]) -> list[str]:
    return [word for flag in named.items() for word in flag]


COMMANDS = [
    command for path in PAGES for command in list_commands(path.read_text("utf-8", "ignore"), str(path.relative_to(REPOSITORY)))
]


@pytest.fixture(autouse=True)
def _at_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_a_gpu_command_fits_the_memory_that_it_names(command: Command) -> None:
    assert command.gpu_memory_gib, "name the memory of its GPUs, as in `8 GPUs with 24 GiB`"
    needed, usable = plan_bytes(command) / 2**30, command.gpu_memory_gib * USABLE_SHARE
    assert needed <= usable, f"needs {needed:.1f} GiB of {usable:.1f} usable"
    if "llm_moe_lora" in command.place:  # which names the smallest GPUs that do
        assert needed > {24: 16, 40: 24}[command.gpu_memory_gib] * USABLE_SHARE
        header = (REPOSITORY / command.place.partition(":")[0]).read_text()
        assert f"# Hardware:   {command.num_processes} GPUs with {command.gpu_memory_gib} GiB" in header


def test_commands_are_found_where_users_read_them() -> None:
    found = [command.place for command in COMMANDS]
    assert [sum(place.startswith(page) for place in found) for page in ("README.md", "recipes/", "docs/")] == [2, 6, 3]
