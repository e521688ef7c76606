"""Options that decide which weights are kept, exported or started from; the profiler window."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.support.workbench import Workbench

TAUGHT: dict[str, Any] = {
    "model__freeze": [r"encoder\..*"],  # its checkpoints lack the encoder and, tied to it, all embeddings
    "optim__lr": 1e-2,
    "optim__schedule": "constant",
    "checkpoint__every_steps": 1,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 1,
    "eval__generate": False,
    "profile__steps": [2, 3],
}
ONE_MORE: dict[str, Any] = {"train__max_steps": 1, "eval__at_start": True, "eval__generate": False}


@pytest.fixture(scope="module")
def taught(bench: Workbench) -> Workbench:
    """The bench with a finished run `taught` on it, whose losses differ from step to step."""
    bench.run("taught", **TAUGHT)
    return bench


def test_init_from_starts_with_the_weights_of_another_run(taught: Workbench) -> None:
    sources = {"taught": 3, "taught/checkpoints/step-00000001": 1, "taught/export": 3}
    names = {source: f"from_{source}".replace("/", "_") for source in sources}
    taught.run_all({name: {"model__init_from": taught.runs / source} | ONE_MORE for source, name in names.items()})
    theirs = {line["step"]: line["loss"] for line in taught.lines("taught", "eval")}
    assert len(set(theirs.values())) == 3
    for source, step in sources.items():
        assert taught.lines(names[source], "eval")[0]["loss"] == pytest.approx(theirs[step], rel=1e-6)
        assert [line["step"] for line in taught.lines(names[source], "train")] == [1]


def test_frozen_weights_come_from_init_from_on_a_resume_too(taught: Workbench) -> None:
    from safetensors.numpy import load_file

    start = {
        "model__init_from": taught.runs / "taught" / "export",
        "model__freeze": [r"decoder\.block\..*"],
        "eval__generate": False,
    }
    taught.run("refrozen", train__max_steps=1, **start)
    taught.run("refrozen", train__max_steps=2, **start)
    weights = [load_file(taught.runs / run / "export" / "model.safetensors") for run in ("taught", "refrozen")]
    assert [line["step"] for line in taught.lines("refrozen", "train")] == [1, 2]
    same = {name: bool((weights[0][name] == weights[1][name]).all()) for name in weights[0]}
    assert same == {name: name.startswith("decoder.block.") for name in same}


def test_init_from_refuses_a_run_on_another_frozen_base(taught: Workbench) -> None:
    from safetensors.numpy import load_file, save_file

    base = taught.runs / "other_base"
    shutil.copytree(taught.models["t5"], base)
    weights = load_file(base / "model.safetensors")
    weights["encoder.final_layer_norm.weight"] = weights["encoder.final_layer_norm.weight"] * 2
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    refused = taught.attempt("other", model=base, model__init_from=taught.runs / "taught", **ONE_MORE)
    assert all(refused.returncodes)
    assert "had frozen are not those of" in refused.stderr and "Traceback" not in refused.stderr


def test_profile_steps_leaves_a_trace_of_each_step_and_rank(taught: Workbench) -> None:
    traces = sorted((taught.runs / "taught" / "profile").iterdir())
    assert [path.stem for path in traces] == [f"step-0000000{step}-rank-0000{rank}" for step in (2, 3) for rank in (0, 1)]
    assert any("AdamW" in event.get("name", "") for event in json.loads(traces[0].read_text())["traceEvents"])
