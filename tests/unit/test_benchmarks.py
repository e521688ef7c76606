"""Measurements: what a step asks of the host; `make gpu` reads its parts from the docs, runs each as a process with a limit,
and goes on where it stopped; every GPU command in README, docs, presets and run YAMLs fits the memory that stands beside it,
by its memory plan; and the section of which preset to take has what the planner found, and still finds."""

import argparse
import dataclasses
import functools
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu.__main__ import DOC, LOTS, Part, main, read_parts, run_part
from benchmarks.gpu.report import format_beside, format_report, format_speed
from benchmarks.measuring import RESULTS
from benchmarks.presets import choice
from benchmarks.presets.page import CHOICE_FILE, update_page
from benchmarks.throughput import host_time
from benchmarks.throughput.host_clock import REST, kernels
from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.errors import UserError
from toolkit.tools.plan.plan import USABLE_SHARE
from toolkit.tools.plan.search import estimate_peak
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.plan.subject import build_subject
from toolkit.tools.plan.trace import fake_ranks


@pytest.mark.parametrize("side", ["single", "fsdp2_full_shard", "fsdp2_shard_grad_op"])
def test_a_step_walks_no_modules_and_its_own_launches_are_few(side, monkeypatch):
    """A walk takes the host 0.4 ms in a T5-base, and 4 ms in an adapter of 32 blocks."""
    walks: list[str] = []
    walk = torch.nn.Module.named_modules

    def noted(module: torch.nn.Module, memo=None, *rest, **more):
        if memo is None:
            walks.append(type(module).__name__)
        return walk(module, memo, *rest, **more)

    _, flags = host_time.MODELS["flan-t5-base"]
    monkeypatch.setitem(host_time.MODELS, "tiny", (host_time.t5(2), flags))
    with fake_ranks(host_time.NUM_RANKS), kernels() as clock:
        step = host_time.build_step("tiny", side, clock)
        step()
        monkeypatch.setattr(torch.nn.Module, "named_modules", noted)
        clock.restart()
        with clock.counting():
            step()
    assert walks == []
    assert {part: clock.launches[part] for part in ("clipping", "AdamW", REST)} == {
        "clipping": 10 + (side != "single"),  # the all-reduce
        "AdamW": 6,
        REST: 20 + 5 * (side == "single"),  # a copy for each block, and one for the rest
    }
    assert (clock.launches["FSDP"] > 0) == (side != "single")


H200 = RESULTS / "gpu_nvidia-h200_2026-11.json"


def test_the_page_has_two_lots_of_five_minutes_for_one_gpu():
    text = DOC.read_text(encoding="utf-8")
    parts = read_parts(text)
    minutes = [round(sum(part.minutes for part in parts if part.lot == lot), 1) for lot in LOTS[:2]]
    assert max(minutes) <= 5 and f"the first lot is {minutes[0]} minutes, the second {minutes[1]}" in text
    assert [part.lot for part in parts] == sorted((part.lot for part in parts), key=LOTS.index)
    assert all(part.minutes < part.limit_minutes and (part.num_gpus == 1 or part.lot == "third") for part in parts)


@pytest.mark.parametrize(
    ("command", "num_gpus", "verdict", "line"),
    [
        ("echo noise; echo '8 passed'; echo 'FIGURES {\"table\": \"t\"}'", 0, "passed", "8 passed"),
        ("echo why >&2; exit 3", 0, "FAILED", "it exited with 3"),
        ("echo left out: no TRL", 0, "left out", "no TRL"),
        ("python -c 'import toolkit; print(toolkit.__name__)'", 0, "passed", "toolkit"),
        ("false", 2, "left out", "it needs 2 GPUs, torch sees 1"),
    ],
)
def test_a_part_is_judged_by_its_exit_status(command, num_gpus, verdict, line, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    part = Part("x", "first", "", num_gpus, 0, 1, command)
    told = run_part(part, argparse.Namespace(folder=tmp_path, small=num_gpus == 0))
    assert (told["verdict"], told["line"]) == (verdict, line)
    if verdict != "left out":
        assert told["figures"] == ([{"table": "t"}] if "FIGURES" in command else [])
        assert told["output"] == ("why\n" if verdict == "FAILED" else "")


def test_a_part_ends_at_its_limit_with_all_that_it_has_started(tmp_path):
    late = tmp_path / "late"
    command = f"setsid bash -c 'sleep 4; touch {late}' & echo 'FIGURES {{\"table\": \"t\"}}'; wait"
    told = run_part(Part("x", "first", "", 0, 0, 0.005, command), argparse.Namespace(folder=tmp_path, small=True))
    assert (told["verdict"], told["line"], told["figures"]) == ("FAILED", "it took more than 0.02 min", [{"table": "t"}])
    time.sleep(4)
    assert not late.exists()


def test_a_second_start_goes_on_where_the_first_one_stopped(tmp_path, monkeypatch, capsys):
    row = "| {} | first | it counts | 1 | 0.1 | 1 | `echo {} >>{}; {}` |"
    page, started = tmp_path / "page.md", tmp_path / "started"
    page.write_text(
        "\n".join(row.format(name, name, started, end) for name, end in (("a", "true"), ("b", "echo why; false"), ("c", "true")))
    )
    monkeypatch.setattr(driver, "DOC", page)
    arguments = ["--small", "--report", str(tmp_path), "--folder", str(tmp_path)]
    assert main(arguments) == 1 and main(arguments) == 1
    assert started.read_text().split() == ["a", "b", "c", "b"]
    assert "a: passed before with this toolkit" in capsys.readouterr().out
    monkeypatch.setattr(driver, "hash_code", lambda: "another toolkit")
    assert main([*arguments, "--parts", "a"]) == 0 and started.read_text().split()[-1] == "a"
    first = json.loads(next(path for path in tmp_path.glob("gpu_small_*.json") if "_anot" not in path.name).read_text())
    assert [part["verdict"] for part in first["parts"].values()] == ["passed", "FAILED", "passed"]
    assert "## The end of b" in format_report(first)


def test_the_pages_have_the_tables_of_the_report():
    """`python -m benchmarks.gpu.report FILE` prints them."""
    result = json.loads(H200.read_text(encoding="utf-8"))
    assert format_beside(result) in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert format_speed(result) in (REPOSITORY / "benchmarks/README.md").read_text(encoding="utf-8")
    assert H200.with_suffix(".md").read_text(encoding="utf-8") == format_report(result)


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


PRESETS = Path(__file__).parents[2] / "accelerate_configs"
CELLS = json.loads((PRESETS / CHOICE_FILE).read_text())["cells"]


def test_the_planner_still_finds_what_the_page_says():
    wanted = ("8B (Llama 3.1)", "full", 8, 80)
    (cell,) = (c for c in CELLS if (c["model"], c["way"], c["num_gpus"], c["gpu_gib"]) == wanted)
    strategy = dict(choice.candidates(8, 80, PRESETS))[cell["preset"]]
    subject = choice.build_shape(cell["model"], cell["way"], PRESETS)
    with fake_ranks(8):
        assert estimate_peak(subject, strategy, rows=1) == pytest.approx(cell["peak_bytes"], rel=1e-3)  # other versions of torch


def test_a_page_that_is_out_of_date_is_reported_with_the_command(tmp_path):
    presets = Path(shutil.copytree(PRESETS, tmp_path / "presets"))
    update_page(presets, write=False)
    page = presets / "README.md"
    page.write_text(page.read_text().replace("3B (Llama 3.2)", "3B"))
    with pytest.raises(
        UserError, match=r"made from which_preset.json is out of date; run `python -m benchmarks.presets.page --write "
    ):
        update_page(presets, write=False)
    update_page(presets, write=True)
    update_page(presets, write=False)
    preset = presets / "ddp.yaml"
    preset.write_text(f"# another comment\n{preset.read_text()}")
    update_page(presets, write=False)  # a comment changes no plan
    preset.write_text(preset.read_text().replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    assert "has changed: run `python -m benchmarks.presets.page --write --plan " in refusal(update_page, presets, write=False)
