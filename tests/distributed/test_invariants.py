"""Invariants 1, 2 and 5 on the recipes themselves: the same curve, gradients, rows and evaluation of an encoder-decoder, and of a
causal model in full, with an adapter, or with one on a quantized base, however they are cut, packed, sharded and computed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import build_gemmas, save_jsonl
from tests.support.quantized.models import save_quantizable_models
from tests.support.same_runs import rows_by_step
from tests.support.small_run import (
    NUM_STEPS,
    RELATIVE_TOLERANCE,
    Finished,
    check_curve,
    check_gradients,
    draw_texts,
    figures,
    run_recipes,
    train_and_record_gradients,
    train_without_export,
    write_inputs,
)
from toolkit.files.json_lines import load_json_lines

CHECKPOINTING = {"fsdp_config": {"fsdp_activation_checkpointing": True}}
BY_SIZE = {"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1500}}
COMPILED = {"dynamo_config": {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": True}}
HSDP, OFFLOAD, FSDP1 = (GPU_PRESET_OVERRIDES_ON_CPU[name] for name in ("fsdp2_hsdp", "fsdp2_offload", "fsdp1_full_shard"))
PACKED = ["--data.packing", "true"]
LORA = ["--adapter.method", "lora", "--adapter.rank", "4"]
SHARDED = ["--eval.unshard", "never"]
NF4, INT8 = ["--adapter.base_dtype", "nf4"], ["--adapter.base_dtype", "int8"]
DORA = [*LORA, "--adapter.method", "dora"]
EXPERTS = [*LORA, "--adapter.experts", "true"]


def rows_at_once(training: int, evaluation: int = 16) -> list[str]:
    return ["--train.micro_batch_size_rows", str(training), "--eval.batch_size_rows", str(evaluation)]


# name: preset, overrides of its YAML, flags. The logits of one that is chunked are computed in several parts.
Runs = dict[str, tuple[str, dict[str, Any], list[str]]]
T5_RUNS: Runs = {
    "single": ("single", {}, rows_at_once(4)),
    "single-1": ("single", {}, rows_at_once(1, 1)),
    "ddp-2": ("ddp_cpu", {}, rows_at_once(2)),
    "fsdp2-1": ("fsdp2_cpu", {}, rows_at_once(1)),
    "fsdp2-2": ("fsdp2_cpu", {}, [*rows_at_once(2, 1), *SHARDED]),
    "fsdp2-4": ("fsdp2_cpu", {}, [*rows_at_once(4), "--data.num_loader_workers", "1", "--data.pad_lengths", "true"]),
    # Units inside units, and tied weights.
    "fsdp2-by-size": ("fsdp2_cpu", BY_SIZE, [*rows_at_once(2), *SHARDED]),
    "fsdp2-checkpointing": ("fsdp2_cpu", CHECKPOINTING, rows_at_once(2)),
    "fsdp2-compiled": ("fsdp2_cpu", COMPILED, rows_at_once(4)),
    "hsdp-2": ("fsdp2_hsdp", HSDP, [*rows_at_once(2), *SHARDED]),
    "fsdp1-4": ("fsdp1_full_shard", FSDP1, rows_at_once(4)),
}
CAUSAL_RUNS: Runs = {
    "single": ("single", {}, rows_at_once(4)),
    "single-packed-chunked": ("single", {}, [*PACKED, *rows_at_once(2)]),
    "ddp-packed": ("ddp_cpu", {}, [*PACKED, *rows_at_once(1)]),
    "fsdp2-chunked": ("fsdp2_cpu", {}, [*rows_at_once(2), *SHARDED]),
    "fsdp2-packed": ("fsdp2_cpu", {}, [*PACKED, *rows_at_once(4), "--data.num_loader_workers", "1"]),
    "fsdp2-checkpointing-chunked": ("fsdp2_cpu", CHECKPOINTING, [*PACKED, *rows_at_once(1)]),
    "fsdp2-by-size-chunked": ("fsdp2_cpu", BY_SIZE, [*rows_at_once(2), *SHARDED]),
    "fsdp2-compiled-checkpointing": ("fsdp2_cpu", COMPILED | CHECKPOINTING, [*PACKED, *rows_at_once(8)]),
    "fsdp1-packed-chunked": ("fsdp1_full_shard", FSDP1, [*PACKED, *rows_at_once(1)]),
}
IN_FULL = ("fsdp2-compiled-checkpointing", "fsdp1-packed-chunked")
"""An adapter's blocks are compiled on a base in codes; `tests/recipes/test_resume.py` has one under FSDP1."""
Kinds = dict[str, tuple[str, str, list[str], Runs]]
IN_CODES: Kinds = {
    "nf4": (
        "llm", "llm", LORA,
        {
            "plain": ("single", {}, ["--model.name_or_path", "{folder}/llm-nf4"]),
            "single": ("single", {}, NF4),
            "ddp-packed": ("ddp_cpu", {}, [*NF4, *PACKED]),
            "fsdp2-packed-checkpointing": ("fsdp2_cpu", CHECKPOINTING, [*NF4, *PACKED, *SHARDED]),
            "fsdp2-compiled": ("fsdp2_cpu", COMPILED, NF4),
            "hsdp": ("fsdp2_hsdp", HSDP, [*NF4, *rows_at_once(1)]),
            "offload": ("fsdp2_offload", OFFLOAD, NF4),
        },
    ),
    "int8": (
        "llm", "llm", LORA,
        {
            "plain": ("single", {}, ["--model.name_or_path", "{folder}/llm-int8"]),
            "fsdp2-checkpointing": ("fsdp2_cpu", CHECKPOINTING, INT8),
        },
    ),
    "dora": (
        "llm", "llm", DORA,
        {"plain": ("single", {}, ["--model.name_or_path", "{folder}/llm-nf4"]), "fsdp2": ("fsdp2_cpu", {}, NF4)},
    ),
    "moe": (
        "llm", "moe", EXPERTS,
        {
            "plain": ("single", {}, ["--model.name_or_path", "{folder}/moe-nf4"]),
            "ddp-packed": ("ddp_cpu", {}, [*NF4, *PACKED]),
            # Each expert is cut by rows.
            "fsdp2-checkpointing": ("fsdp2_cpu", CHECKPOINTING, [*NF4, "--export.merge", "true"]),
        },
    ),
    "t5-nf4": (
        "t5", "t5", LORA,
        {"plain": ("single", {}, ["--model.name_or_path", "{folder}/t5-nf4"]), "fsdp2": ("fsdp2_cpu", {}, NF4)},
    ),
}  # fmt: skip
"""As `KINDS`: an adapter on a quantized base trains as on a plain one with the dequantized weights, the first of each kind."""
KINDS: Kinds = {
    "t5": ("t5", "model", ["--model.from_scratch", "true"], T5_RUNS),
    "full": ("llm", "gemma3", [], CAUSAL_RUNS),
    "lora": (
        "llm",
        "gemma2",
        LORA,
        {name: run for name, run in CAUSAL_RUNS.items() if name not in IN_FULL},
    ),
    **IN_CODES,
}
"""By what trains, recipe, model folder, flags and runs. Gemma 3 attends to packed rows by document, Gemma 2 (a soft cap, so no
sdpa) by a dense mask."""
CASES = [f"{kind} {name}" for kind, (*_, runs) in KINDS.items() for name in runs]
EXPORTED = ("t5 fsdp2-compiled", "full fsdp2-by-size-chunked", "lora fsdp2-by-size-chunked", "moe fsdp2-checkpointing")
"""Of the other presets, exports are in `tests/recipes/`."""


def reference_of(case: str) -> str:
    """The first run of the kind, on one process."""
    kind = case.split()[0]
    return f"{kind} {next(iter(KINDS[kind][-1]))}"


OTHERS = [case for case in CASES if case != reference_of(case)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Rows of very different lengths for either recipe, a T5, and tiny Gemmas: tied, with a cap on their logits and windows on
    their attention."""
    folder = tmp_path_factory.mktemp("invariants")
    write_inputs(folder)
    texts = draw_texts(80, (2, 14), (1, 8))
    save_jsonl(folder / "prompts.jsonl", [{"prompt": prompt, "completion": completion} for prompt, completion in texts])
    for build in (build_gemmas, save_quantizable_models):
        run_on_ranks(build, preset="single", overrides={"mixed_precision": "no"}, args=(folder,))
    return folder


@pytest.fixture(scope="module")
def finished(folder) -> dict[str, Finished]:
    """Every run once, by kind and name."""
    of_causal = ["--data.packing", "false", "--data.bucket_by_length", "false", "--data.max_length_tokens", "64"]
    runs = {}
    for kind, (recipe, model, flags_of_kind, of_kind) in KINDS.items():
        always = ["--model.name_or_path", str(folder / model), *flags_of_kind, *(of_causal if recipe == "llm" else [])]
        always += ["--eval.generate", "false"] if kind in IN_CODES else []
        for name, (preset, overrides, flags) in of_kind.items():
            case = f"{kind} {name}"
            runs[case] = {
                "preset": preset,
                "overrides": overrides,
                "recipe": recipe,
                "rows": "prompts.jsonl" if recipe == "llm" else "rows.jsonl",
                "flags": [*always, *(flag.format(folder=folder) for flag in flags)],
                "max_logits": 2000 if "chunked" in name else 2**26,
                "function": train_and_record_gradients if case in EXPORTED else train_without_export,
            }
    return run_recipes(folder, runs)


@pytest.mark.parametrize("case", OTHERS)
def test_curve_and_first_gradients_are_those_of_one_process(finished, case):
    (expected_lines, expected_gradients), (lines, gradients) = finished[reference_of(case)], finished[case]
    check_curve(lines, expected_lines, ("loss", "grad_norm", "num_rows", "num_tokens", "num_label_tokens"))
    check_gradients(gradients, expected_gradients[0])
    expected, actual = figures(expected_lines, "train"), figures(lines, "train")
    assert actual["learning_rate"].tolist() == expected["learning_rate"].tolist()
    assert len(set(expected["num_rows"].tolist())) == 2, "a smaller last batch should be among the steps"


@pytest.mark.parametrize("case", CASES)
def test_recorded_gradient_norm_is_the_global_one(finished, case):
    gradients = finished[reference_of(case)][1][0]
    expected = np.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values()))
    assert figures(finished[case][0], "train")["grad_norm"][0] == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_batch_without_overlap(folder, case):
    expected, actual = (rows_by_step(folder / "runs" / run) for run in (reference_of(case), case))
    for step in range(1, NUM_STEPS + 1):
        assert len(actual[step]) == len(set(actual[step])), f"step {step}: a row was trained on twice"
        assert set(actual[step]) == set(expected[step]), f"step {step}: not the rows of the global batch"


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_takes_every_row_once(folder, finished, kind):
    reference = reference_of(kind)
    lines = figures(finished[reference][0], "train")
    first_epoch = [int(step) for step, epoch in zip(lines["step"], lines["epoch"], strict=True) if epoch == 0]
    rows = [row for step in first_epoch for row in rows_by_step(folder / "runs" / reference)[step]]
    assert len(first_epoch) < NUM_STEPS, "the run should go beyond an epoch"
    assert len(rows) == len(set(rows)) == int(lines["num_rows"][: len(first_epoch)].sum())


@pytest.mark.parametrize("case", OTHERS)
def test_evaluation_depends_on_neither_batch_size_nor_processes(folder, finished, case):
    """The loss at any time, and, unless it is the reference that is quantized, all figures before the first step, and texts."""
    expected, actual = (figures(finished[run][0], "eval") for run in (reference_of(case), case))
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=RELATIVE_TOLERANCE)
    np.testing.assert_allclose(actual["perplexity"], np.exp(actual["loss"]))
    if case.split()[0] not in IN_CODES:
        for figure in expected.keys() - {"kind", "rows_per_s", "rouge_tokenizer", "measured_on"}:
            np.testing.assert_allclose(actual[figure][0], expected[figure][0], rtol=1e-6, err_msg=figure)
        predictions = [load_json_lines(folder / "runs" / run / "predictions-0.jsonl") for run in (reference_of(case), case)]
        assert predictions[0] == predictions[1]


def test_only_adapters_train(finished):
    trained = finished["lora single"][1][0]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "types", "placement"),
    [
        ("fsdp2_cpu", 2, {"DTensor"}, {"(Shard(dim=0),)"}),
        # 2 x 2: each rank's half is another's too.
        ("fsdp2_hsdp", 4, {"DTensor"}, {"(Replicate(), Shard(dim=0))"}),
        ("fsdp1_full_shard", 2, {"Parameter"}, set()),
    ],
    ids=["fsdp2", "hsdp", "fsdp1"],
)
def test_parameters_are_sharded(preset, num_ranks, types, placement):
    """Each rank holds half of every parameter, gradient and moment, so that a silent DDP shows."""
    overrides = {"mixed_precision": "no", **GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {})}
    reports = run_on_ranks(report_shards, preset=preset, overrides=overrides)
    assert len(reports) == num_ranks
    for report in reports:
        assert (report["types"], report["placements"]) == (types, placement)
        assert report["local_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["gradient_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["moment_bytes"] == pytest.approx(report["whole_bytes"], rel=0.02)  # two moments, half of each
        assert report["whole_gathered_bytes"] == report["whole_bytes"]


def report_shards() -> dict:
    """On every rank: one step of a tiny T5, and what each rank then holds."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.config.schema import OptimConfig
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.gather import unsharded_parameters
    from toolkit.parallel.units import local_tensor
    from toolkit.parallel.wrap import shard_model
    from toolkit.training.optim import build_optimizer

    accelerator = build_accelerator()
    model = T5ForConditionalGeneration(T5Config(**T5_CONFIG))
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    sharded = shard_model(accelerator, model)
    optimizer = build_optimizer(OptimConfig(), sharded.model)
    ids = torch.arange(8).reshape(2, 4)
    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    parameters = list(sharded.model.parameters())

    def num_bytes(tensors: list) -> int:
        return sum(local_tensor(t).numel() * t.element_size() for t in tensors)

    gradient_bytes = num_bytes([p.grad for p in parameters if p.grad is not None])
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "types": {"DTensor" if isinstance(p, DTensor) else type(p).__name__ for p in parameters},
        "placements": {str(p.placements) for p in parameters if isinstance(p, DTensor)},
        "whole_bytes": whole_bytes,
        "local_bytes": num_bytes(parameters),
        "gradient_bytes": gradient_bytes,
        "moment_bytes": num_bytes(moments),
        "whole_gathered_bytes": sum(p.numel() * p.element_size() for _, p in unsharded_parameters(sharded)),
    }
