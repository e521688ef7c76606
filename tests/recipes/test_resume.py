"""Stop anywhere and go on: the same run, bit for bit; on other processes the same rows; and what a resume refuses."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.checkpoint_files import change_manifest
from tests.support.launch import TIMEOUT_S, Running, run_on_ranks
from tests.support.same_runs import check_same, rows_by_place
from tests.support.workbench import FP32, Workbench
from toolkit.checkpoint.manifest import read_manifest

NUM_STEPS = 10
STEPS_PER_EPOCH = 7  # 52 training rows: an epoch ends inside the run, with a smaller batch
EXACT = {
    "model__dropout": 0.1,
    "train__max_steps": NUM_STEPS,
    "train__micro_batch_size_rows": 2,  # two micro-batches a step on each of two processes
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 8,
    "log_row_ids": True,
}


@pytest.fixture(scope="module")
def uninterrupted(bench) -> Workbench:
    bench.run("whole", **EXACT)
    return bench


def test_killed_run_goes_on_bit_for_bit(uninterrupted):
    bench = uninterrupted
    whole = kill_and_go_on(bench, **EXACT)
    assert [line["epoch"] for line in whole] == [0] * STEPS_PER_EPOCH + [1] * (NUM_STEPS - STEPS_PER_EPOCH)
    assert whole[-1]["num_input_tokens_seen"] == sum(line["num_tokens"] for line in whole)
    assert whole[STEPS_PER_EPOCH - 1]["num_rows"] < whole[0]["num_rows"], "the smaller last batch is not in it"
    assert max(micro_batch for _, _, micro_batch in rows_by_place(bench.runs / "whole")) == 1
    exports = [(bench.runs / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert exports[0] == exports[1]


def test_complete_run_says_so_and_exports_again(uninterrupted):
    bench, folder = uninterrupted, uninterrupted.runs / "whole"
    metrics = (folder / "metrics.jsonl").read_bytes()
    weights = (folder / "export" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "export")
    printed = bench.run("whole", **EXACT)
    assert f"nothing left to train: the run is complete at step {NUM_STEPS}\n" in printed
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert (folder / "export" / "model.safetensors").read_bytes() == weights

    # Somewhere else there is the checkpoint's own evaluation to show, and nothing before it.
    last = folder / "checkpoints" / f"step-{NUM_STEPS:08d}"
    printed = bench.run("elsewhere", preset="single", **EXACT, checkpoint__resume=last)
    missing = "has no figures of earlier steps but the checkpoint's own evaluation"
    assert f"{bench.runs / 'elsewhere' / 'metrics.jsonl'} {missing}" in printed
    assert f"\nafter step {NUM_STEPS} " in printed and "\nbefore training" not in printed
    assert (bench.runs / "elsewhere" / "export" / "model.safetensors").read_bytes() == weights


def test_frozen_weights_stay_and_are_not_in_the_checkpoint(bench):
    from safetensors.numpy import load_file

    base = load_file(bench.models["t5"] / "model.safetensors")
    freeze = {"model__freeze": [r"encoder\..*", r".*\.layer_norm\.weight"]}
    assert "; attention: sdpa\n" in bench.run("frozen", **freeze)

    # Earlier versions took eager attention for T5 on CPUs, and noted it: such a run goes on so.
    change_manifest(bench.checkpoint("frozen", 3), lambda manifest: manifest["identity"]["config"].update(attention="eager"))
    printed = bench.run("frozen", train__max_steps=5, **freeze)
    assert "after step 3\n" in printed and "; attention: eager\n" in printed
    assert read_manifest(bench.checkpoint("frozen", 5))["identity"]["config"]["attention"] == "eager"
    exported = load_file(bench.runs / "frozen" / "export" / "model.safetensors")
    assert exported.keys() == base.keys()
    # `shared` is frozen under its alias `encoder.embed_tokens`
    is_frozen = {name: name.startswith(("encoder.", "shared.")) or ".layer_norm." in name for name in base}
    assert {name: bool((exported[name] == base[name]).all()) for name in base} == is_frozen
    stored = on_one_process(list_tensors, bench.runs / "frozen" / "checkpoints" / "step-00000005" / "state")
    in_weights = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    in_moments = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in stored if name.startswith("optimizer.")}
    assert in_weights == in_moments == {name for name in base if not is_frozen[name]}


def kill_and_go_on(bench: Workbench, **settings) -> list[dict]:
    """A run beside the finished `whole` is killed and resumed: the same, bit for bit. Returns the training lines of `whole`."""
    with bench.start("killed", **settings) as running:
        kill_after(running, bench, step=7)
    committed = max(int(name.removeprefix("step-")) for name in bench.checkpoints("killed") if not name.endswith(".tmp"))
    assert committed in (6, 9)
    return go_on(bench, committed, **settings)


def go_on(bench: Workbench, committed: int, **settings) -> list[dict]:
    """The run `killed` goes on from that step to the end of `whole`."""
    before = bench.lines("killed", "train")
    printed = bench.run("killed", **settings)
    assert f"step-{committed:08d}, after step {committed}\n" in printed
    after = bench.lines("killed", "train")
    assert after[:committed] == before[:committed], "steps before the checkpoint ran again: their times differ"
    check_same(bench, "killed", "whole", NUM_STEPS)
    return bench.lines("whole", "train")


def kill_after(running: Running, bench: Workbench, step: int) -> None:
    """Kill all ranks once that step is in the metrics, and the checkpoint of the one before on disk."""
    deadline = time.monotonic() + TIMEOUT_S
    while not bench.checkpoint("killed", step - 1).is_dir() or bench.lines("killed", "train")[-1]["step"] < step:
        assert time.monotonic() < deadline, running.last_words()
        time.sleep(0.005)
    for pid in running.pids:
        os.kill(pid, signal.SIGKILL)
    assert running.wait().returncodes == [-signal.SIGKILL] * 2, "the run was over before it was killed"


def on_one_process(function, *args):
    return run_on_ranks(function, preset="single", overrides=FP32, args=args)[0]


def list_tensors(folder: Path) -> list[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def load_whole(folder: Path) -> dict:
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in described.items()}
    load(tensors, storage_reader=FileSystemReader(folder))
    return tensors
