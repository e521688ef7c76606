"""Mixtures of experts, and adapters on them, train as one plain process does, on any number of ranks, packed or not."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed.test_invariants import CHECKPOINTING, COMPILED
from tests.planting.plant import NO_FAULT
from tests.support import plain_mixture as plain
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import MIXTURES, build_model_folders, make_rows, save_jsonl
from tests.support.small_run import RELATIVE_TOLERANCE, Finished, check_arrays, check_gradients, figures, run_recipes
from tests.support.workbench import FP32, as_flags

Case = dict[str, Any]
NUM_ROWS = 12
ROUTERS = r".*\.(gate|router)\.(weight|bias)"
TRAINED: dict[str, str] = {"full": "", "frozen-routers": ROUTERS, "attention": "", "experts": ""}
"""What a run trains, and what it freezes, as a regular expression. The last two are adapters on that, or on that too."""
ADAPTED = ("attention", "experts")
BLOCKS = {"plain": {}, "checkpointed": CHECKPOINTING, "compiled": COMPILED}
PRESETS = {
    1: ("single", {}),
    2: ("fsdp2_cpu", {}),
    4: ("fsdp2_cpu", {"num_processes": 4}),
    "hsdp": ("fsdp2_hsdp", GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"]),
    "fsdp1": ("fsdp1_full_shard", GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"]),
}
"""By ranks: preset, overrides."""
FACTORS = {
    "family": tuple(MIXTURES),
    "trained": tuple(TRAINED),
    "ranks": tuple(PRESETS),
    "micro_batch_rows": (1, 3),
    "packing": (True, False),
    "blocks": tuple(BLOCKS),
    "auxiliary": ("off", "document", "global"),
}
UNEVEN = ("qwen3_moe", "olmoe")
"""Families with 6 and 2 experts: four ranks cut these unevenly, or have too few."""


def exists(case: Case) -> bool:
    """Every family is on two ranks, plain and checkpointed. One is compiled, and alone, under HSDP and FSDP1, in one way. An
    adapter keeps the auxiliary loss off."""
    if case["trained"] in ADAPTED and case["auxiliary"] != "off":
        return False
    in_one_way = (case["trained"], case["auxiliary"], case["packing"], case["micro_batch_rows"]) == ("full", "global", True, 1)
    if (case["blocks"] == "compiled" or case["ranks"] not in (2, 4)) and not in_one_way:
        return False
    if case["ranks"] == 2:
        return case["blocks"] != "compiled" or case["family"] == "mixtral"
    return case["blocks"] == "plain" and case["family"] in (UNEVEN if case["ranks"] == 4 else ("mixtral",))


def cover_pairs() -> list[Case]:
    """The cases, chosen one after another, in which each value of a factor meets each value of every other factor at least once:
    each meets the most pairs that no one before it has met."""
    every = [case for values in itertools.product(*FACTORS.values()) if exists(case := dict(zip(FACTORS, values, strict=True)))]
    pairs_of = [frozenset(itertools.combinations(case.items(), 2)) for case in every]
    left, chosen = set().union(*pairs_of), []
    while left:
        best = max(range(len(every)), key=lambda place: len(pairs_of[place] & left))
        chosen.append(every[best])
        left -= pairs_of[best]
    return chosen


CASES = {"-".join(str(value) for value in case.values()): case for case in cover_pairs()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder, tuple(MIXTURES)), env=NO_FAULT)
    save_jsonl(folder / "rows.jsonl", make_prompts())
    return folder


def make_prompts() -> list[dict[str, str]]:
    return [{"prompt": row["source"], "completion": " " + row["target"]} for row in make_rows(NUM_ROWS, seed=1)]


@pytest.fixture(scope="module")
def expected(folder) -> dict[tuple[str, ...], plain.Expected]:
    return run_on_ranks(train_all_plainly, preset="single", overrides=FP32, args=(folder,), env=NO_FAULT)[0]


def train_all_plainly(folder: Path) -> dict[tuple[str, ...], plain.Expected]:
    found = {}
    for family, trained, auxiliary in sorted({(case["family"], case["trained"], case["auxiliary"]) for case in CASES.values()}):
        adapter = folder / f"{family}-{trained}" if trained in ADAPTED else None
        if adapter:
            plain.start_adapter(folder / family, trained == "experts", adapter)
        how = (TRAINED[trained], auxiliary, adapter)
        found[family, trained, auxiliary] = plain.train_plain(folder / family, make_prompts(), *how)
    return found


@pytest.fixture(scope="module")
def finished(folder, expected) -> dict[str, Finished]:
    assert expected  # has written the adapters
    return run_recipes(folder, {name: how(folder, case) for name, case in CASES.items()})


def how(folder: Path, case: Case) -> dict:
    if case["trained"] in ADAPTED:  # the merge takes as long as a run
        adapter = folder / f"{case['family']}-{case['trained']}"
        own = {"adapter.method": "lora", "adapter.name_or_path": adapter, "export.merge": case["trained"] == "experts"}
    else:
        freeze = [TRAINED[case["trained"]]] if TRAINED[case["trained"]] else []
        own = {"model.freeze": freeze, "optim.router_aux_loss": case["auxiliary"]}
    values = {
        "model.name_or_path": folder / case["family"],
        "data.max_length_tokens": 96,
        "data.packing": case["packing"],
        "data.eval_fraction": 0,
        "train.max_steps": plain.NUM_STEPS,
        "train.global_batch_size_rows": NUM_ROWS,
        "train.micro_batch_size_rows": case["micro_batch_rows"],
        "optim.lr": plain.LR,
        "optim.beta1": plain.BETA1,
        "optim.beta2": plain.BETA2,
        "optim.eps": plain.EPS,
        "optim.weight_decay": plain.WEIGHT_DECAY,
        "optim.max_grad_norm": None,
        "eval.generate": False,
    }
    preset, overrides = PRESETS[case["ranks"]]
    return {"preset": preset, "overrides": overrides | BLOCKS[case["blocks"]], "recipe": "llm", "flags": as_flags(values | own)}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_one_plain_process(folder, expected, finished, name):
    case, (lines, gradients) = CASES[name], finished[name]
    wanted, run = expected[case["family"], case["trained"], case["auxiliary"]], folder / "runs" / name
    check_gradients(gradients, wanted.gradients)
    logged = figures(lines, "train")
    np.testing.assert_allclose(logged["loss"], wanted.losses, rtol=RELATIVE_TOLERANCE)
    for figure, of_plain in (("router_aux_loss", wanted.auxiliary_losses), ("router_busiest_share", wanted.busiest_shares)):
        np.testing.assert_allclose(logged.get(figure, []), of_plain, rtol=RELATIVE_TOLERANCE, err_msg=figure)
    files = [file for file in wanted.files if (run / f"{file}.safetensors").exists()]
    assert files == list(wanted.files)[: 2 if case["trained"] == "experts" else 1]
    for file in files:
        check_arrays(load_file(run / f"{file}.safetensors"), wanted.files[file])
