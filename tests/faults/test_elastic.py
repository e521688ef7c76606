"""From one checkpoint on other processes and other sharding: the same rows, weights and moments exact, the curve goes on.

The runs are uneven on purpose: an epoch ends with a batch of one row, of which all ranks but one get none, and there is one
held-out row, of which all ranks but one get none either.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.harness import run_with
from tests.recipes.test_resume import load_whole, on_one_process
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU
from tests.support.same_runs import rows_by_place, rows_by_step
from tests.support.workbench import FP32, Workbench, step_name

RELATIVE_TOLERANCE = 1e-5
NUM_STEPS, SAVED_STEP = 6, 2
LOADED = "weights and moments are those of the checkpoint"
CHANGES = {
    "model__dropout": 0,
    "train__max_steps": NUM_STEPS,
    "train__global_batch_size_rows": 17,  # 52 rows: three batches, and a fourth of one row
    "train__micro_batch_size_rows": 4,
    "checkpoint__every_steps": SAVED_STEP,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 3,
    "eval__num_rows": 1,
    "log_row_ids": True,
    "optim__weight_decay": 0.1,
}
WHERE = {
    "single": {"preset": "single"},
    "ddp-2": {"preset": "ddp_cpu"},
    "fsdp2-2": {"preset": "fsdp2_cpu"},
    "fsdp2-3": {"preset": "fsdp2_cpu", "num_processes": 3},
    "hsdp-4": {"preset": "fsdp2_hsdp", "overrides": GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"] | FP32},
    "fsdp1-2": {"preset": "fsdp1_full_shard", "overrides": GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"] | FP32},
}
# Kind of run: recipe, settings.
KINDS = {
    "tied": ("t5", {}),
    "frozen": ("t5", {"model__freeze": [r"encoder\..*"], "eval__unshard": "never"}),
    "lora": ("llm", {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2, "data__max_length_tokens": 64}),
}
# Kind, from where, to where, whether with the export.
CHANGED: list[tuple[str, str, str, bool]] = [
    ("tied", "fsdp2-2", "single", True),
    ("tied", "fsdp2-2", "fsdp2-3", True),
    ("tied", "fsdp2-2", "ddp-2", False),
    ("tied", "fsdp2-2", "fsdp1-2", True),
    ("tied", "fsdp2-2", "hsdp-4", True),
    ("tied", "hsdp-4", "fsdp2-2", True),
    ("tied", "single", "fsdp2-2", True),
    ("tied", "ddp-2", "fsdp2-2", False),
    ("tied", "fsdp1-2", "fsdp2-3", False),
    ("frozen", "fsdp2-2", "single", True),
    ("frozen", "single", "fsdp2-3", True),
    ("lora", "fsdp2-2", "single", True),
    ("lora", "single", "fsdp2-3", True),
]


@pytest.fixture(scope="module")
def benches(bench, llm_bench) -> dict[str, Workbench]:
    """Runs of each kind, in a folder of their own."""
    of = {"t5": bench, "llm": llm_bench}
    return {kind: replace(of[recipe], runs=bench.runs / kind, changes=CHANGES | more) for kind, (recipe, more) in KINDS.items()}


@pytest.mark.parametrize(("kind", "source", "target", "exports"), CHANGED)
def test_resume_elsewhere(benches, kind, source, target, exports):
    bench, name = benches[kind], f"{source}-to-{target}"
    if not (bench.runs / source).exists():  # the run that nothing interrupts
        run_with(bench, source, **WHERE[source])
    later = map(step_name, range(SAVED_STEP + 1, NUM_STEPS + 1))
    shutil.copytree(bench.runs / source, bench.runs / name, ignore=shutil.ignore_patterns(*later, "rows-*"))
    printed = run_with(bench, name, check_loaded, exports=exports, **WHERE[target])

    num_ranks = int(target[-1]) if target[-1].isdigit() else 1
    assert f"after step {SAVED_STEP}\n" in printed and f" rows: {num_ranks} process" in printed
    assert printed.count(LOADED) == num_ranks

    lines = {run: bench.lines(run, "train") for run in (source, name)}
    assert [line["step"] for line in lines[name]] == list(range(1, NUM_STEPS + 1))
    for figure in ("loss", "grad_norm"):
        expected = [line[figure] for line in lines[source]]
        assert [line[figure] for line in lines[name]] == pytest.approx(expected, rel=RELATIVE_TOLERANCE)
    assert [line["learning_rate"] for line in lines[name]] == [line["learning_rate"] for line in lines[source]]
    evaluations = [[line["loss"] for line in bench.lines(run, "eval")] for run in (source, name)]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=RELATIVE_TOLERANCE)
    assert len(evaluations[0]) == 2
    # The same global batches, none of whose rows was taken twice, the one of a single row among them.
    expected = {step: rows for step, rows in rows_by_step(bench.runs / source).items() if step > SAVED_STEP}
    assert rows_by_step(bench.runs / name) == expected
    assert [len(rows) for rows in expected.values()] == [17, 1, 17, 17]
    assert all(len(rows) == len(set(rows)) for rows in expected.values())
    of_uneven_step = [rows for (_, step, _), rows in rows_by_place(bench.runs / name).items() if step == 4]
    assert sorted(map(len, of_uneven_step)) == [0] * (num_ranks - 1) + [1], "no rank was without rows"
    if exports:
        assert on_one_process(compare_export, bench.runs / name / "export", bench.checkpoint(name, NUM_STEPS) / "state") == []


def check_loaded() -> None:
    """Right after a resume, compare weights and moments of every rank with the checkpoint read whole, through torch alone."""
    from toolkit.training import run as run_module

    resume = run_module.resume

    def checked(run, saved) -> None:
        resume(run, saved)
        compare_loaded(saved.folder, run.sharded, run.optimizer)
        print(LOADED, flush=True)

    run_module.resume = checked


def compare_loaded(folder: Path, sharded, optimizer) -> None:
    """What the ranks hold are the checkpoint's tensors. Collective."""
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    from toolkit.checkpoint.state import state_tensors

    theirs, ours = load_whole(folder / "state"), state_tensors(sharded, optimizer)
    num_moments = sum(name.startswith("optimizer.") for name in ours)
    assert ours.keys() == theirs.keys()
    assert num_moments == 3 * (len(ours) - num_moments) > 0, "two moments and a step count each"
    for name, tensor in ours.items():
        whole = theirs[name]
        if isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                meta = shard.metadata
                part = whole[tuple(slice(o, o + n) for o, n in zip(meta.shard_offsets, meta.shard_sizes, strict=True))]
                assert torch.equal(part, shard.tensor), name
        else:
            assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, whole), name


def compare_export(exported: Path, last: Path) -> list[str]:
    """Weights that differ between an export and the checkpoint it came from. A T5 is loaded by transformers, with its ties."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForSeq2SeqLM

    theirs = {name.removeprefix("model."): t for name, t in load_whole(last).items() if name.startswith("model.")}
    if (adapter := exported / "adapter_model.safetensors").exists():
        ours = load_file(adapter)
        theirs = {f"base_model.model.{name.replace('.default.', '.')}": t for name, t in theirs.items()}
        assert ours.keys() == theirs.keys()
    else:
        model, about = AutoModelForSeq2SeqLM.from_pretrained(exported, output_loading_info=True)
        assert not any(about.values()), about
        tied = [model.shared.weight, model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight, model.lm_head.weight]
        assert len({weight.data_ptr() for weight in tied}) == 1, "no longer tied"
        ours = model.state_dict()
    assert theirs
    return [name for name, t in theirs.items() if not torch.equal(ours[name], t)]
