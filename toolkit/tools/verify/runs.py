"""The short runs of a recipe that `verify` compares: the preset and flags of each, and what it is for."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from toolkit.config.load import RecipeConfig
from toolkit.errors import UserError
from toolkit.files.json_lines import load_json_lines
from toolkit.launch.accelerate_yaml import check_accelerate_yaml, check_mapping
from toolkit.optimizers import OPTIMIZERS, OptimizerSettings, with_defaults
from toolkit.tools.preset_runs import adapt_preset, find_preset, reason_of_failure, save_preset
from toolkit.tools.verify import EXPORTED

NUM_STEPS = 4
"""Length of every run, two epochs. The recipe itself checks after three updates that all trainables have moved."""
SAVED_STEP, SAVED_AGAIN = 2, 3
"""An epoch's last step, after which runs are resumed; and a step inside the next one, after which a resumed run is."""
DROPOUT = 0.1
"""Dropout of the runs that prove a resume. The other runs have none, because masks differ between ranks."""
LARGEST_LR = 1e-4
"""Limit of the learning rate: if a gradient is zero up to rounding, Adam makes a full step of the learning rate of it. SGD and
others whose step shrinks with the gradient have none: at so small a rate their weights would not move in fp32."""

LARGEST_GRAD_NORM = 0.1
"""Small enough that clipping takes effect."""
NUM_EVAL_ROWS = 7
"""A prime: the last batch of two rows has one, and in batches of one row a rank of two has one less."""
GENERATION = {"eval.generate": True, "eval.num_beams": 2, "eval.no_repeat_ngram_size": 2, "eval.max_new_tokens": 8}
"""Generation settings of the run that exports, `preset-0`, and of the reference; each changes the generated texts."""

Tensors = dict[str, np.ndarray]
Launch = Callable[[Path, list[str], Path], int]
"""Signature of `preset_runs.launch` and `forks.launch`: preset, command and log → exit status."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """The machine, recipe and model to verify."""

    recipe: Path
    arguments: list[str]
    config: RecipeConfig
    num_positions: int | None
    """Position limit of a causal model; None if there is none."""
    presets: list[str]
    num_processes: int
    use_cpu: bool
    output: Path
    in_bf16: bool = False
    sharded: bool = False
    """No process holds the model alone: it is compared with FSDP2 on one process fewer."""


class NotReached(Exception):
    """A run ended before it wrote what a check needs. Its argument is the run."""


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """One run to launch; then one that has ended."""

    name: str
    title: str
    mapping: dict[str, Any]
    flags: dict[str, Any]
    output: Path
    after: str | None = None
    """The run whose checkpoint it loads,"""
    from_step: int = 0
    """of this step."""
    failure: str | None = None
    """The error that ended it; empty if it was not started, as the run whose checkpoint it needs had failed."""

    @property
    def folder(self) -> Path:
        """The recipe's run folder."""
        return self.output / "runs" / self.name

    @property
    def records(self) -> Path:
        """Folder of the records that `watched_run` writes."""
        return self.output / "records" / self.name

    @property
    def num_shards(self) -> int | None:
        """Number of ranks over which a parameter is sharded; None without FSDP."""
        if self.mapping["distributed_type"] != "FSDP":
            return None
        mesh = self.mapping.get("parallelism_config") or {}
        return mesh.get("parallelism_config_dp_shard_size", self.mapping["num_processes"])

    # --- What it has left. Each raises `NotReached` where that is missing.

    def lines(self, kind: str, *, needed: bool = True) -> list[dict[str, Any]]:
        """Lines of one kind in metrics.jsonl; if they are needed, with the last step."""
        path = self.folder / "metrics.jsonl"
        lines = [line for line in load_json_lines(path, skip_torn_end=True) if line["kind"] == kind] if path.exists() else []
        if needed and (not lines or lines[-1]["step"] != NUM_STEPS):
            raise NotReached(self)
        return lines

    def rows_of_steps(self) -> dict[int, list[int]]:
        """Row ids by step, of all ranks and micro-batches, rank 0's first, with the last step."""
        steps: dict[int, list[int]] = {}
        for path in sorted(self.folder.glob("rows-*.jsonl")):
            for line in load_json_lines(path, skip_torn_end=True):
                steps.setdefault(line["step"], []).extend(line["row_ids"])
        if NUM_STEPS not in steps:
            raise NotReached(self)
        return steps

    def tensors(self, name: str) -> Tensors:
        """A record's unsharded tensors."""
        try:
            return load_file(self.records / f"{name}.safetensors")
        except (OSError, SafetensorError):
            raise NotReached(self) from None

    def about(self, name: str) -> dict[str, Any]:
        """A record's JSON, which describes what the ranks hold."""
        path = self.records / f"{name}.json"
        if not path.is_file():
            raise NotReached(self)
        return json.loads(path.read_text(encoding="utf-8"))


def plan_runs(box: Box) -> dict[str, WatchedRun]:
    """All runs by name, in order. `preset-0`, … are the user's presets; `preset-0` is the first with FSDP, resumed and exported.
    A preset that does not exist, is wrong, or does not fit the number of processes is a `UserError`."""
    processes, rows = box.num_processes, 4 * box.num_processes
    chosen, runs = _choose_presets(box), dict[str, WatchedRun]()
    few, of_few = _adapted(box, "single", None), "one process"
    if box.sharded:
        few, of_few = _adapted(box, "fsdp2_full_shard", processes - 1), f"FSDP2 x {processes - 1}"
    ddp, takes_ddp = _adapted(box, "ddp", processes), not box.sharded
    (main_title, main), dropout = chosen[0], _flags(box, rows=rows, micro=1, dropout=DROPOUT)

    def plan(name: str, title: str, mapping: dict[str, Any], flags: dict[str, Any], after: str = "", step: int = 0) -> None:
        checkpoint = runs[after].folder / "checkpoints" / f"step-{step:08d}" if after else "never"
        flags = {**flags, "checkpoint.resume": checkpoint, "run.name": name}
        flags |= GENERATION if name in ("reference", EXPORTED) else {}
        known: dict[str, Any] = {"after": after or None, "from_step": step, "output": box.output}
        runs[name] = WatchedRun(name=name, title=title, mapping=mapping, flags=flags, **known)

    # One process, or few, is the reference. Where texts are generated, evaluations are few.
    ends = {"eval.at_start": True}
    each, some = (ends | {"eval.every_steps": steps} for steps in (1, 3))
    plan("reference", of_few, few, _flags(box, rows=rows, micro=4) | ends)
    if takes_ddp and not any(mapping["distributed_type"] == "MULTI_GPU" for _, mapping in chosen):
        plan("ddp", f"ddp x {processes}", ddp, _flags(box, rows=rows, micro=2) | each)
    for place, (title, mapping) in enumerate(chosen):
        plan(f"preset-{place}", title, mapping, _flags(box, rows=rows, micro=1 + place % 2) | (each if place else ends))
    # Resumes, not evaluated before the end: on few processes, and with dropout on the same processes, twice.
    moved, where = _flags(box, rows=rows, micro=2), f"{main_title}, resumed"
    plan("resharded", f"{where} by {of_few}", few, moved, EXPORTED, SAVED_STEP)
    plan("dropout", f"{main_title}, dropout {DROPOUT}", main, dropout | some)
    plan("resumed", where, main, dropout | {"checkpoint.every_steps": 1}, "dropout", SAVED_STEP)
    plan("resumed-again", f"{where} again", main, dropout, "resumed", SAVED_AGAIN)
    # Under DDP the same elements are dropped, but not by compiled blocks.
    if takes_ddp and main["distributed_type"] == "FSDP" and not main.get("dynamo_config"):
        plan("ddp-dropout", f"{where} by ddp, dropout {DROPOUT}", ddp, dropout | each, "dropout", SAVED_STEP)
    # With dropout, once more without recomputation, for each preset that recomputes activations, as itself or the config asks.
    of_all = box.config.train.activation_checkpointing != "none"
    kept = {"train.activation_checkpointing": "none"} if of_all else {}
    for place, (title, mapping) in enumerate(chosen):
        fsdp = mapping.get("fsdp_config") or {}
        recomputing = {key: False for key in fsdp if key.removeprefix("fsdp_") == "activation_checkpointing" and fsdp[key]}
        if recomputing or of_all:
            if place:  # the first is `dropout`
                plan(f"recomputed-{place}", f"{title}, dropout {DROPOUT}", mapping, dropout)
            keeping = mapping | ({"fsdp_config": fsdp | recomputing} if fsdp else {})
            plan(f"kept-{place}", f"{title}, dropout {DROPOUT}, not recomputed", keeping, dropout | kept)
    if box.in_bf16:
        plan("bf16", f"{main_title}, bf16", main | {"mixed_precision": "bf16"}, moved)
    return runs


def _choose_presets(box: Box) -> list[tuple[str, dict[str, Any]]]:
    """The user's presets, each with its name in the table; the first with FSDP in front."""
    chosen = [(name, _adapted(box, name, box.num_processes)) for name in box.presets]
    if singles := [name for name, mapping in chosen if mapping["distributed_type"] == "NO"]:
        raise UserError(f"--presets names {singles[0]}, which has one process, as the others are compared with: leave it out")
    first = next((preset for preset in chosen if preset[1]["distributed_type"] == "FSDP"), chosen[0])
    chosen = [first, *(preset for preset in chosen if preset is not first)]
    return [(f"{Path(name).stem} x {box.num_processes}", mapping) for name, mapping in chosen]


def launch_all(box: Box, plans: dict[str, WatchedRun], launch: Launch, launch_resumed: Launch) -> Iterator[WatchedRun]:
    """Launch the runs one after the other, and print how long each took. `launch_resumed` starts the run `resumed`, which is
    compared bit for bit. Settings that the first run refuses are a `UserError`: the user's mistake, not a failed check."""
    width = max(len(run.title) for run in plans.values())
    failures: dict[str | None, str | None] = {}
    for number, run in enumerate(plans.values(), start=1):
        log = box.output / "logs" / f"{run.name}.txt"
        preset = save_preset(run.mapping, box.output / "presets" / f"{run.name}.yaml")
        flags = [f"--{key}={value if isinstance(value, str | Path) else json.dumps(value)}" for key, value in run.flags.items()]
        command = ["-m", "toolkit.tools.verify.watched_run", str(box.recipe), str(run.records), *box.arguments, *flags]
        print(f"run {number} of {len(plans)}: {run.title:<{width}}", end="  ", flush=True)

        # Launch it, unless the run whose checkpoint it loads has failed.
        start_s, failure = time.perf_counter(), None if failures.get(run.after) is None else ""
        if failure is None and (launch_resumed if run.name == "resumed" else launch)(preset, command, log):
            # The error of the rank that failed first.
            noted = [json.loads(path.read_text(encoding="utf-8")) for path in run.records.glob("failed-*.json")]
            failure = min(noted, key=lambda about: about["time_s"])["reason"] if noted else reason_of_failure(log)
        took = f"{time.perf_counter() - start_s:5.1f} s{'  failed' if failure else ''}"
        print("not started" if failure == "" else took, flush=True)

        # A refusal of the first run is raised; other failures are rows of the table.
        if failure and number == 1 and f"error: {failure}" in log.read_text(encoding="utf-8", errors="replace").split("\n"):
            raise UserError(failure)
        failures[run.name] = failure
        # Checkpoints of this run and of the one it loaded, unless needed: all together might fill the disk.
        needed = {None, *(later.after for later in list(plans.values())[number:])}
        for name in set() if failure is not None else {run.name, run.after} - needed:
            shutil.rmtree(box.output / "runs" / str(name) / "checkpoints", ignore_errors=True)
        yield replace(run, failure=failure)


def _adapted(box: Box, name: str, num_processes: int | None) -> dict[str, Any]:
    """A preset adapted to fp32 and to this machine, and checked."""
    mapping = check_accelerate_yaml(find_preset(name))
    if mapping.get("mixed_precision") == "fp8":
        raise UserError(f"--presets names {name}, whose float8 products only approximate those of one process: leave it out")
    adapted = adapt_preset(mapping, num_processes=num_processes, use_cpu=box.use_cpu) | {
        "mixed_precision": "no",
        "use_cpu": box.use_cpu,  # as in all runs that it is compared with, whatever the preset says
    }
    check_mapping(adapted, f"--presets names {name}, which cannot run here")
    return adapted


def _largest_lr(settings: OptimizerSettings) -> float:
    """`LARGEST_LR`, or infinity where a smaller gradient makes a smaller step."""
    optimizer, weight = OPTIMIZERS[settings.name], np.ones((2, 2))
    make_step = partial(optimizer.write_out, with_defaults(settings), weight, state={}, step=1, lr=1.0, weight_decay=0.0)
    step, small_step = (abs(make_step(gradient=np.full_like(weight, size))[0]).max() for size in (1.0, 1e-3))
    return math.inf if small_step < step / 2 else LARGEST_LR


def _flags(box: Box, *, rows: int, micro: int, dropout: float = 0.0) -> dict[str, Any]:
    """Flags that override the user's config: few steps of `rows`, everything logged and saved."""
    config = box.config
    micro = min(micro, config.train.micro_batch_size_rows)  # which fit into memory
    has_adapter, own_dropout = config.adapter.method != "none", 0.0 if config.adapter.experts else dropout
    # A prompt of the maximum length would leave no position for generated tokens.
    room = (box.num_positions or math.inf) - GENERATION["eval.max_new_tokens"]
    is_cut = getattr(config.data, "max_length_tokens", 0) > room
    return {
        **({"data.max_length_tokens": room} if is_cut else {}),
        "model.dropout": dropout,
        "model.frozen_dtype": "float32",
        "model.trained_dtype": "float32",
        **({"adapter.dropout": own_dropout, "export.merge": True, "export.merge_into": "dequantized"} if has_adapter else {}),
        "train.max_steps": NUM_STEPS,
        "train.num_epochs": None,
        "train.global_batch_size_rows": rows,
        "train.global_batch_size_tokens": None,
        "train.micro_batch_size_rows": micro,
        "optim.lr": min(float(config.optim.lr), _largest_lr(config.optim)),
        "optim.warmup_steps": 0,
        "optim.warmup_ratio": 0,
        "optim.max_grad_norm": min(config.optim.max_grad_norm or LARGEST_GRAD_NORM, LARGEST_GRAD_NORM),
        "optim.skip_beyond_sigmas": None,
        "eval.every_steps": None,
        "eval.every_epochs": None,
        "eval.at_start": False,
        "eval.num_rows": NUM_EVAL_ROWS,
        "eval.batch_size_rows": micro,
        "eval.generate": False,
        "eval.best_metric": "loss",
        "eval.early_stopping_patience": None,
        "checkpoint.every_steps": SAVED_STEP,
        "checkpoint.every_epochs": None,
        "checkpoint.keep_last": NUM_STEPS,
        "checkpoint.keep_best": 0,
        "export.weights": "last",
        "tracking.log_with": [],
        "profile.steps": None,
        "log_every_steps": 1,
        "log_row_ids": True,
        "run.output_dir": box.output / "runs",
        # As several processes have; more threads would spend their time waiting in a small model.
        "run.num_threads": config.run.num_threads or (1 if box.use_cpu else None),
    }
