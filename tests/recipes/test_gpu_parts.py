"""The parts of `make gpu` for one GPU, tiny and on a CPU, as `make gpu-small` runs them: only the measuring needs a GPU."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import DOC, LOTS, main, read_parts
from benchmarks.gpu.presets import KINDS
from benchmarks.gpu.shapes import CASES

PARTS = [part for part in read_parts(DOC.read_text(encoding="utf-8")) if part.lot in LOTS[:2]]

AS_OTHERS = ("tests", "t5-base", "t5-large", "compiled", "qlora")
"""`tests` is the last of `make test`; T5 is in `one-rank`, NF4 in `presets`, and `test_invariants.py` compiles."""
TRIED = ("single", "fsdp2_fp8")
"""FSDP2 on one rank is in `one-rank`, in bf16 on two in `test_bf16.py`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture
def run(folder, monkeypatch):
    """Run a part of that name; its entry in the report, which all tests of this file fill."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run_part(name: str) -> dict:
        code = main(["--small", "--folder", str(folder), "--parts", name])
        part = json.loads(next(folder.glob("gpu_small_*.json")).read_text())["parts"][name]
        assert code == 0, part["output"]
        return part

    return run_part


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [part for part in PARTS if part.name not in ("presets", *AS_OTHERS)], ids=lambda part: part.name)
def test_a_part_hands_in_what_its_command_names(part, run):
    told = run(part.name)
    if told["verdict"] == "left out":  # `make test` installs no TRL
        assert part.name == "beside-trl" and "TRL is not installed" in told["line"]
        return
    words = [word.partition("@") for word in part.command.split() if word.partition("@")[0].removesuffix("-evaluation") in CASES]
    sides = 2 if "peers" in part.command else 1
    assert len(told["figures"]) == sides * len(words)
    for place, figures in enumerate(told["figures"]):
        name, _, preset = words[place // sides]
        assert figures["work"] == CASES[name.removesuffix("-evaluation")].title and figures["preset"] == (preset or "single")
        assert figures["rows_per_s"] > 0 and (sides == 2 or figures["profiled"]["host_operations"] > 100)


@pytest.mark.timeout(900)
def test_presets_train_resume_and_export_as_the_cpu_does(run, monkeypatch):
    """Two of the eleven, which train a T5 in `tests/recipes/test_presets.py`."""
    (part,) = (part for part in PARTS if part.name == "presets")
    part = dataclasses.replace(part, command=f"{part.command} --only {' '.join(TRIED)}")
    monkeypatch.setattr(gpu, "read_parts", lambda _: [part])
    told = run("presets")
    tried = {(figures["preset"], figures["model"]): figures["verdict"] for figures in told["figures"]}
    assert tried.keys() == {(preset, kind) for kind, (presets, _) in KINDS.items() for preset in presets if preset in TRIED}
    assert {preset for (preset, _), verdict in tried.items() if verdict != "passed"} <= {"fsdp2_fp8"}  # which no CPU multiplies
