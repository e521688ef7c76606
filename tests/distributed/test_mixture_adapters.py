"""Adapters on the attention and on the experts of mixtures train as plain peft does, on any number of ranks, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.distributed.test_mixtures import BLOCKS, TOLERANCE, assert_close, exists, flags, make_prompts
from tests.support.launch import run_on_ranks
from tests.support.model_folders import MIXTURES, build_model_folders, save_jsonl
from tests.support.pairwise import Case, cover_pairs
from tests.support.plain_mixture_adapters import KINDS, Expected, start_adapter, train_plain
from tests.support.small_run import figures, train_and_record_gradients
from tests.support.workbench import FP32
from toolkit.files.json_lines import load_json_lines

FACTORS: dict[str, tuple[Any, ...]] = {
    "family": tuple(MIXTURES),
    "kind": KINDS,
    "ranks": (2, 4),
    "packing": (True, False),
    "micro_batch_rows": (1, 3),
    "blocks": ("plain", "checkpointed"),
}
CASES = {"-".join(str(value) for value in case.values()): case for case in cover_pairs(FACTORS, exists)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of each family, and rows."""
    folder = tmp_path_factory.mktemp("mixture-adapters")
    run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder, tuple(MIXTURES)))
    save_jsonl(folder / "rows.jsonl", make_prompts())
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, str], Expected]:
    """By family and kind."""
    return run_on_ranks(train_all_plainly, preset="single", overrides=FP32, args=(folder,))[0]


def train_all_plainly(folder: Path) -> dict[tuple[str, str], Expected]:
    found = {}
    for family, kind in sorted({(case["family"], case["kind"]) for case in CASES.values()}):
        start_adapter(folder / family, kind, adapter := folder / f"{family}-{kind}")
        found[family, kind] = train_plain(folder / family, adapter, make_prompts())
    return found


@pytest.fixture(scope="module")
def gradients(folder: Path, expected: Any) -> dict[str, list[dict[str, np.ndarray]]]:
    """Of the first step of a case, on every rank. All cases of a number of ranks and a preset run one after another."""
    assert expected  # has written the adapters
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for ranks, blocks in {(case["ranks"], case["blocks"]): None for case in CASES.values()}:
        names = [name for name, case in CASES.items() if (case["ranks"], case["blocks"]) == (ranks, blocks)]
        where: dict[str, Any] = {"preset": "fsdp2_cpu", "overrides": FP32 | BLOCKS[blocks]}
        of_ranks = run_on_ranks(train_cases, num_processes=ranks, args=(folder, names), **where)
        found |= {name: [of_rank[name] for of_rank in of_ranks] for name in names}
    return found


def train_cases(folder: Path, names: list[str]) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for name in names:
        case = CASES[name]
        adapter = {"adapter.method": "lora", "adapter.name_or_path": folder / f"{case['family']}-{case['kind']}"}
        own = adapter | {"export.merge": is_merged(case)}
        found[name] = train_and_record_gradients("llm", flags(folder, name, case, own), 2**26)
    return found


def is_merged(case: Case) -> bool:
    """Each family is, once or twice: it takes as long as a run."""
    return case["kind"] == "experts"


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_plain_peft_on_one_process(
    folder: Path, expected: dict[Any, Expected], gradients: dict[str, list[dict[str, np.ndarray]]], name: str
) -> None:
    case = CASES[name]
    wanted, run = expected[case["family"], case["kind"]], folder / "runs" / name
    for of_rank in gradients[name]:
        assert of_rank.keys() == wanted.gradients.keys()
        for parameter, gradient in wanted.gradients.items():
            assert_close(of_rank[parameter], gradient, f"gradient of {parameter}")
    losses = figures(load_json_lines(run / "metrics.jsonl"), "train")["loss"]
    np.testing.assert_allclose(losses, wanted.losses, rtol=TOLERANCE)
    files = {"export/adapter_model": wanted.adapter} | ({"merged/model": wanted.merged} if is_merged(case) else {})
    for file, tensors in files.items():
        weights = load_file(run / f"{file}.safetensors")
        assert weights.keys() == tensors.keys()
        for parameter, weight in tensors.items():
            assert_close(weights[parameter].numpy(), weight.numpy(), f"{file} {parameter}")
