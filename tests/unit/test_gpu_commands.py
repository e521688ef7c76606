"""Every GPU command in README, docs, presets and run YAMLs fits the memory that stands beside it, by its memory plan."""

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

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


def list_commands(text: str, place: str) -> Iterator:
    """Page, preset, number of processes, recipe, words and the GiB named last before a command's end in its section or comment,
    else first after it. Left out are those that cannot be planned: on CPUs, or with a run YAML that a reader writes."""
    for section in re.split(r"^#+ (?=[A-Z])" if place.endswith(".md") else r"^(?!#)", text, flags=re.MULTILINE):
        section = re.sub(r" *\\\n(# *)?", " ", section)
        for match in COMMAND.finditer(section):
            preset, number, recipe, words = match.groups()
            flags = shlex.split(words, comments=True)
            mapping = yaml.safe_load((REPOSITORY / f"accelerate_configs/{preset}.yaml").read_text())
            if not mapping["use_cpu"] and "/" in flags[flags.index("--config") + 1]:
                named = [*reversed(MEMORY.findall(section[: match.end()])), *MEMORY.findall(section[match.end() :])]
                values = place, preset, int(number or mapping["num_processes"]), recipe, flags, int(named[0]) if named else 0
                yield pytest.param(*values, id=f"{place}: {preset}")


@functools.cache
def plan_bytes(strategy: Strategy, recipe: str, flags: tuple[str, ...]) -> int:
    """A rank's peak in the command's own micro-batch."""
    config = load_config(LLMConfig if recipe == "llm" else SummarizationConfig, list(flags))
    model = Path(config.model.name_or_path)
    subject = build_subject(str(model if model.is_dir() else HUB_MODELS / model), strategy, list(flags), recipe)
    with fake_ranks(strategy.num_processes):
        return estimate_peak(subject, strategy, subject.config.train.micro_batch_size_rows)


COMMANDS = [
    command for path in PAGES for command in list_commands(path.read_text("utf-8", "ignore"), str(path.relative_to(REPOSITORY)))
]


@pytest.mark.parametrize(("place", "preset", "num_processes", "recipe", "flags", "gpu_gib"), COMMANDS)
def test_a_gpu_command_fits_the_memory_that_it_names(place, preset, num_processes, recipe, flags, gpu_gib, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert gpu_gib, "name the memory of its GPUs, as in `8 GPUs with 24 GiB`"
    given = dict(zip(flags[::2], flags[1::2], strict=True)) | {"--data.files": "rows"}
    named = {name: value for name, value in given.items() if name not in WITHOUT_MEMORY and not PLACEHOLDER.fullmatch(value)}
    strategy = load_strategy(REPOSITORY / f"accelerate_configs/{preset}.yaml", num_processes, gpu_gib)
    # Compiled blocks and float8 are planned as plain ones.
    strategy = dataclasses.replace(strategy, is_compiled=False, is_float8=False)
    needed = plan_bytes(strategy, recipe, tuple(word for flag in sorted(named.items()) for word in flag)) / 2**30
    assert needed <= gpu_gib * USABLE_SHARE, f"needs {needed:.1f} GiB of {gpu_gib * USABLE_SHARE:.1f} usable"
    if "llm_moe_lora" in place:  # which names the smallest GPUs that do
        assert needed > {24: 16, 40: 24}[gpu_gib] * USABLE_SHARE
        header = (REPOSITORY / place).read_text()
        assert f"# Hardware:   {num_processes} GPUs with {gpu_gib} GiB" in header


def test_commands_are_found_where_users_read_them():
    found = [command.values[0] for command in COMMANDS]
    assert [sum(place.startswith(page) for place in found) for page in ("README.md", "recipes/", "docs/")] == [2, 6, 3]
