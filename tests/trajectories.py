"""Records what runs compute, and compares what the code computes now with a record, bit for bit.

    python -m tests.trajectories record FOLDER    # at the commit that a redesign starts from
    python -m tests.trajectories compare FOLDER   # after every move, on the same machine

Compared are every number of metrics.jsonl that no clock decides, the rows of every step, predictions, and the files of exports;
for a run from its start, and for one that resumes from the checkpoint of the record. FOLDER stays outside the repository.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import build_model_folders
from tests.support.workbench import FP32, ROWS, Workbench, run_each, save_rows, step_name
from toolkit.files.json_lines import load_json_lines

FAMILIES = {"t5": "t5", "untied": "flan_t5", "llama": "llama", "tied": "qwen3", "mixture": "qwen3_moe"}
"""Model by name."""
PRESETS = {"single": "single_cpu", "ddp": "ddp_cpu", "fsdp2": "fsdp2_cpu", "hsdp": "fsdp2_hsdp", "fsdp1": "fsdp1_full_shard"}
NUM_STEPS, SAVED_STEP = 6, 3
SETTINGS = {
    "train.max_steps": NUM_STEPS, "optim.lr": 3e-3, "optim.weight_decay": 0.1, "eval.at_start": True, "log_row_ids": True,
    "eval.every_steps": SAVED_STEP, "eval.num_rows": 5, "eval.max_new_tokens": 5, "checkpoint.every_steps": SAVED_STEP,
}  # fmt: skip
LORA = {"adapter.method": "lora", "adapter.rank": 4, "adapter.dropout": 0.1}
DORA = LORA | {"adapter.method": "dora"}
NF4 = LORA | {"adapter.base_dtype": "nf4"}
PACKED = {"data.packing": True}
SPLIT = {"train.micro_batch_size_rows": 1}
SCRATCH = {"model.from_scratch": True}
TOKENS = {"model.add_tokens": ["\n", "<tag>"]}
EXPERTS = LORA | {"adapter.experts": True, "adapter.dropout": 0}

# name: model, strategies, flags
RUNS = {
    "t5": ("t5", "single ddp fsdp2 hsdp fsdp1", {}),
    "t5-split": ("untied", "fsdp2", SPLIT | {"eval.num_beams": 2}),
    "t5-scratch": ("t5", "single ddp fsdp2 fsdp1", SCRATCH),
    "t5-tokens": ("untied", "single fsdp2", TOKENS),
    "t5-lora": ("t5", "single fsdp2 fsdp1", LORA),
    "t5-frozen": ("t5", "single ddp fsdp2", {"model.freeze": [r"encoder\..*"]}),
    "llama": ("llama", "single ddp fsdp2 hsdp fsdp1", PACKED),
    "llama-padded": ("llama", "single fsdp2", {"data.packing": False, **SPLIT}),
    "llama-scratch": ("tied", "single fsdp2", SCRATCH | PACKED),
    "tied-tokens": ("tied", "fsdp2 fsdp1", TOKENS),
    "lora": ("tied", "single ddp fsdp2 hsdp fsdp1", LORA | PACKED | {"export.merge": True}),
    "lora-tokens": ("tied", "single fsdp2", LORA | TOKENS | {"export.merge": True}),
    "dora": ("llama", "single fsdp2 fsdp1", DORA),
    "nf4": ("llama", "single ddp fsdp2 hsdp", NF4 | PACKED | {"export.merge": True}),
    "int8-dora": ("llama", "single fsdp2", DORA | {"adapter.base_dtype": "int8"}),
    "mixture": ("mixture", "single ddp fsdp2 fsdp1", PACKED | {"optim.router_aux_loss": "global"}),
    "mixture-adapter": ("mixture", "single fsdp2", EXPERTS | PACKED),
    "adafactor": ("t5", "single fsdp2", {"optim.name": "adafactor"}),
}  # fmt: skip
VARYING = {
    "tokens_per_s", "tokens_per_s_per_rank", "step_time_s", "peak_memory_gib", "rows_per_s", "blocking_s", "write_s", "num_bytes"
}  # fmt: skip
"""Keys of metrics.jsonl that a clock, the machine or the length of a path decides."""
MAY_DIFFER = {"README.md", "trainer_state.json"}
"""Files of an export that name the run's folder or hold times."""


def main() -> None:
    """Record or compare; the exit status is 1 if anything differs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("action", choices=["record", "compare"])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("runs", nargs="*", help="names of runs; all if there are none")
    given = arguments.parse_args()
    folder, chosen = given.folder.resolve(), {name: RUNS[name] for name in given.runs or RUNS}
    if given.action == "record":
        folder.mkdir(parents=True)
        run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder, tuple(FAMILIES.values())))
        save_rows(folder)
        for name, told in _run(folder, folder / "recorded", chosen):
            (folder / f"{name}.json").write_text(json.dumps(told, indent=1))
        return
    shutil.rmtree(folder / "again", ignore_errors=True)
    differences = []
    for resumed in (False, True):
        for name, now in _run(folder, folder / "again", chosen, resumed=resumed):
            found = _compare(json.loads((folder / f"{name}.json").read_text()), now)
            where = f"{name}{', resumed' if resumed else ''}"
            print(f"{where}: {'; '.join(found) or 'equal'}", flush=True)
            differences += found
    sys.exit(bool(differences))


def _run(folder: Path, runs: Path, chosen: dict, *, resumed: bool = False) -> Iterator[tuple[str, dict]]:
    """The name of each run, with its strategy, and what it computes; the runs of a strategy share a launch."""
    for strategy, preset in PRESETS.items():
        argvs = {}
        for name, (model, strategies, changes) in chosen.items():
            if strategy in strategies.split():
                run = runs / f"{name}.{strategy}"
                if resumed:
                    _take_back(folder / "recorded" / run.name, run)
                recipe = "t5" if model in ("t5", "untied") else "llm"
                bench = Workbench(runs, {}, data=folder, recipe=recipe, rows=ROWS[recipe], changes=SETTINGS | changes)
                argvs[run.name] = (recipe, bench.flags(run.name, folder / FAMILIES[model]))
        if not argvs:
            continue
        overrides = FP32 | GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {})
        run_each(list(argvs.values()), preset=preset, overrides=overrides, timeout_s=3600)
        yield from ((name, _look(runs / name)) for name in argvs)


def _take_back(recorded: Path, run: Path) -> None:
    """A recorded run as if it had been killed after its first checkpoint."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(recorded, run, ignore=shutil.ignore_patterns(step_name(NUM_STEPS), "export*", "merged", "predictions-6*"))


def _look(run: Path) -> dict:
    """Every number that no clock decides, and the hash of every file that has no time in it."""
    lines = {}
    for line in load_json_lines(run / "metrics.jsonl"):  # the line of an asynchronous save may come before a step's or after
        name = " ".join(str(line[key]) for key in ("kind", "name", "layer", "step") if key in line)
        if line["kind"] != "resume":
            lines[name] = {key: value for key, value in line.items() if key not in VARYING}
    files = [*run.glob("predictions-*"), *run.glob("rows*.jsonl"), *run.glob("export/**/*"), *run.glob("merged/**/*")]
    hashes = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
        if path.is_file() and path.name not in MAY_DIFFER
    }
    return {"lines": lines, "files": hashes}


def _compare(recorded: dict, now: dict) -> list[str]:
    """What differs, in words: of the lines the first, and all files."""
    found = []
    for name, line in (recorded["lines"] | now["lines"]).items():
        one, other = recorded["lines"].get(name, {}), now["lines"].get(name, {})
        if keys := [key for key in line if one.get(key) != other.get(key)]:
            found.append(f"{name}: " + ", ".join(f"{key} {one.get(key)} != {other.get(key)}" for key in keys))
            break
    return found + [
        f"{path} differs" for path in recorded["files"] | now["files"] if recorded["files"].get(path) != now["files"].get(path)
    ]


if __name__ == "__main__":
    main()
