"""Trains models of the real shapes for a few steps: speed, MFU, memory beside its plan, the GPU's idle share, a profiled step.

    python -m benchmarks.gpu.train t5-base llama-1b@fsdp2_full_shard

`NAME@PRESET` is one of `shapes.CASES` under a preset, `single` if none is named; all run in this one process. With
`--on-all-gpus` a preset is launched on every GPU instead. No run saves or exports: an 8B model's checkpoint and export take
130 GB of disk, and say nothing about its speed. The run itself counts FLOPs and MFU (`toolkit/tracking/flops.py`).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.parts import emit, finetune_here, part_parser, preset_file
from benchmarks.gpu.shapes import Case, find_case, list_flags, random_weights, write_inputs
from benchmarks.measuring import REPOSITORY, read_training

NUM_STEPS = {False: (5, 25), True: (1, 3)}
"""By `--small`, the steps that warm up, and the last of those that are timed. The one after it is profiled."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits for the GPU. `cudaDeviceSynchronize` is the profiler's own, at its end."""


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME[@PRESET]")
    parser.add_argument("--on-all-gpus", metavar="PRESET", help="launch a rank on each GPU under this preset; without a GPU two")
    options = parser.parse_args()
    if options.on_all_gpus and "WORLD_SIZE" not in os.environ:
        launch_on_all_gpus(options)
    failed = []
    for run in options.runs:
        name, _, preset = run.partition("@")
        try:
            measure(name, options.on_all_gpus or preset or "single", options.folder, small=options.small)
        except Exception:  # the others may still run
            traceback.print_exc()
            failed.append(run)
    print(f"measured: {', '.join(options.runs)}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def launch_on_all_gpus(options: argparse.Namespace) -> None:
    """Write the inputs of all runs, and become `accelerate launch` of this same command."""
    import torch

    file, number = REPOSITORY / "accelerate_configs" / f"{options.on_all_gpus}.yaml", torch.cuda.device_count() or 2
    for name in options.runs:
        prepare(name, options.folder, number, small=options.small)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", str(number)]
    os.execv(sys.executable, [*launcher, "-m", "benchmarks.gpu.train", *sys.argv[1:]])


def prepare(name: str, folder: Path, num_ranks: int, *, small: bool) -> tuple[Path, Path | None]:
    """Write the inputs of a run, unless a launch has; the folder with them, and the one with an 8B's weights."""
    case, own = find_case(name, small=small), folder / f"{name}-on-{num_ranks}{'-small' * small}"
    if "WORLD_SIZE" not in os.environ:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        write_inputs(case, (NUM_STEPS[small][1] + 1) * num_ranks, own)
    has_weights = not case.flags.keys().isdisjoint(("adapter.method", "model.trained_dtype"))
    return own, random_weights(case, own, folder, "bfloat16") if has_weights else None


def measure(name: str, preset: str, folder: Path, *, small: bool) -> None:
    """Train one case under one preset, and print its figures."""
    import torch

    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.training import finetune
    from toolkit.training.run import leave

    case, (warm_up, last) = find_case(name, small=small), NUM_STEPS[small]
    rank, num_ranks = (int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    own, weights = prepare(name, folder, num_ranks, small=small)
    flags = list_flags(case, own, weights, num_ranks) | {
        "train.max_steps": last + 1,
        "profile.steps": [last + 1, last + 1],
        "log_every_steps": warm_up,  # a line has the mean time of the steps since the one before
        "run.name": preset,
    }
    start_s, to_first_step_s = time.perf_counter(), []

    def after_step(info: Any) -> None:
        if info.step == 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            to_first_step_s.append(time.perf_counter() - start_s)

    with (
        mock.patch.object(CheckpointWriter, "save", lambda *_, **__: None),
        mock.patch.object(finetune, "finish", lambda run: leave(run.trackers)),
    ):
        precision = "bf16" if "model.trained_dtype" in case.flags else "no"
        file = None if "WORLD_SIZE" in os.environ else preset_file(preset, own, precision)
        finetune_here(file, case.recipe, flags, after_step)
    if rank == 0:
        figures = {"to_first_step_s": to_first_step_s[0], **read_run(own / "runs" / preset, case, warm_up, last)}
        emit("training", work=case.title, preset=preset, side="ours", num_gpus=num_ranks, **figures)


def read_run(run: Path, case: Case, warm_up: int, last: int) -> dict[str, Any]:
    """What a run folder says of the steps after the warm-up up to `last`, of its memory, and of the profiled step."""
    from toolkit.files.json_lines import load_json_lines
    from toolkit.tools.report.facts import read_runs
    from toolkit.tools.report.terminal import _predict

    lines = [line for line in load_json_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    timed = [line for line in lines if warm_up < line["step"] <= last]
    speed, step_s = read_training(timed, 0), statistics.fmean(line["step_time_s"] for line in timed)
    length, most = speed["tokens_per_s"] / speed["samples_per_s"], sum(case.tokens)
    assert case.shares or length > 0.999 * most, f"rows have {length:.1f} tokens on average, not {most}"
    step = read_trace(next((run / "profile").glob("*-rank-00000.json")))
    figures = {
        "rows_per_s": speed["samples_per_s"], "tokens_per_s": speed["tokens_per_s"], "step_s": step_s, "profiled": step,
        "peak_gib": max(line["peak_memory_gib"] for line in lines[:last]),
    }  # fmt: skip
    if "mfu_percent" in timed[0]:
        figures["mfu_percent"] = statistics.fmean(line["mfu_percent"] for line in timed)
    if step["kernels"]:
        # The profiler slows the host, not the kernels: their time, for as many tokens as the timed steps have.
        tokens = statistics.fmean(line["num_tokens"] for line in timed) / lines[-1]["num_tokens"]
        figures["idle_percent"] = 100 * (1 - step["busy_ms"] * tokens / step_s / 1e3)
    try:
        figures["planned_gib"] = _predict(read_runs([run])[0]) / 2**30
    except Exception as error:  # compiled blocks and float8 have no plan
        print(f"no plan: {error}", flush=True)
    return figures


def read_trace(path: Path) -> dict[str, float]:
    """What a step did, from its Chrome trace. Without a GPU there are no kernels, and the busy time is 0."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    on_host = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    waits = [event["dur"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["name"] in WAITS]
    busy_us, end = 0.0, float("-inf")
    for first, last in sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in ON_GPU):
        busy_us += max(0.0, last - max(first, end))  # kernels of several streams may run at once
        end = max(end, last)
    return {
        "kernels": sum(event.get("cat") == "kernel" for event in events), "busy_ms": round(busy_us / 1e3, 1),
        "host_operations": len(on_host), "casts": on_host.count("aten::to"),
        "waits": len(waits), "waits_ms": round(sum(waits) / 1e3, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
