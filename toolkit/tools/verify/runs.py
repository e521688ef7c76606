"""The short runs of a recipe that `verify` compares: the preset and flags of each, and what it is for."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.load import RecipeConfig
from toolkit.errors import UserError
from toolkit.launch.accelerate_yaml import check_accelerate_yaml, check_mapping
from toolkit.tools.preset_runs import adapt_preset, find_preset, reason_of_failure, save_preset
from toolkit.tools.verify import EXPORTED

NUM_STEPS = 4
"""Length of every run, two epochs. The recipe itself checks after three updates that all trainables have moved."""
SAVED_STEP, SAVED_AGAIN = 2, 3
"""An epoch's last step, after which runs are resumed; and a step inside the next one, after which a resumed run is."""
DROPOUT = 0.1
"""Dropout of the runs that prove a resume. The other runs have none, because masks differ between ranks."""
LARGEST_LR = 1e-4
"""Limit of the learning rate: if a gradient is zero up to rounding, Adam makes a full step of the learning rate of it."""

LARGEST_GRAD_NORM = 0.1
"""Small enough that clipping takes effect."""
NUM_EVAL_ROWS = 7
"""A prime: the last batch of two rows has one, and in batches of one row a rank of two has one less."""
GENERATION = {"eval.generate": True, "eval.num_beams": 2, "eval.no_repeat_ngram_size": 2, "eval.max_new_tokens": 8}
"""Generation settings of the run that exports, `preset-0`, and of the reference; each changes the generated texts."""

Launch = Callable[[Path, list[str], Path], int]
"""Signature of `preset_runs.launch` and `forks.launch`: preset, command and log → exit status."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """The machine, recipe and model to verify."""

    recipe: Path
    arguments: list[str]
    """The recipe's arguments, as the user would give them."""
    config: RecipeConfig
    """The config that the arguments give."""
    num_positions: int | None
    """Position limit of a causal model; None if there is none."""
    presets: list[str]
    num_processes: int
    use_cpu: bool
    output: Path
    in_bf16: bool = False
    sharded: bool = False
    """No process holds the model alone: it is compared with FSDP2 on one process fewer."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run to launch."""

    name: str
    """Name of its folder."""
    title: str
    """Its name in the table."""
    mapping: dict[str, Any]
    """Its accelerate YAML."""
    flags: dict[str, Any]
    after: str | None = None
    """The run whose checkpoint it loads,"""
    from_step: int = 0
    """of this step."""

    @property
    def num_shards(self) -> int | None:
        """Number of ranks over which a parameter is sharded; None without FSDP."""
        if self.mapping["distributed_type"] != "FSDP":
            return None
        mesh = self.mapping.get("parallelism_config") or {}
        return mesh.get("parallelism_config_dp_shard_size", self.mapping["num_processes"])


@dataclass(frozen=True)
class WatchedRun:
    """A run that has ended, successfully or not."""

    plan: PlannedRun
    folder: Path
    """The recipe's run folder."""
    records: Path
    """Folder of the records that `watched_run` wrote."""
    failure: str | None
    """The error that ended it; empty if it was not started, as the run whose checkpoint it needs had failed."""

    @property
    def title(self) -> str:
        """Its name in the table."""
        return self.plan.title


def plan_runs(box: Box) -> dict[str, PlannedRun]:
    """All runs by name, in order. `preset-0`, … are the user's presets; `preset-0` is the first with FSDP, resumed and exported.
    A preset that does not exist, is wrong, or does not fit the number of processes is a `UserError`."""
    # The user's presets, the first with FSDP in front.
    processes, rows = box.num_processes, 4 * box.num_processes
    chosen = [(name, _adapted(box, name, processes)) for name in box.presets]
    if singles := [name for name, mapping in chosen if mapping["distributed_type"] == "NO"]:
        raise UserError(
            f"--presets names {singles[0]}, which has one process: leave it out, the others are compared with one process anyway"
        )
    is_sharded = [mapping["distributed_type"] == "FSDP" for _, mapping in chosen]
    main = is_sharded.index(True) if any(is_sharded) else 0
    chosen = [chosen[main], *chosen[:main], *chosen[main + 1 :]]
    alone = ("fsdp2_full_shard", processes - 1) if box.sharded else ("single", None)
    few, title_of_few = _adapted(box, *alone), f"FSDP2 x {processes - 1}" if box.sharded else "one process"
    ddp, takes_ddp = _adapted(box, "ddp", processes), not box.sharded
    (main_name, main_mapping), dropout = chosen[0], _flags(box, rows=rows, micro=1, dropout=DROPOUT)

    def planned(
        name: str, where: str, mapping: dict[str, Any], flags: dict[str, Any], after: str | None = None, step: int = SAVED_STEP
    ) -> PlannedRun:
        checkpoint = box.output / "runs" / after / "checkpoints" / f"step-{step:08d}" if after else "never"
        more = GENERATION if name in ("reference", EXPORTED) else {}
        flags = {**flags, "checkpoint.resume": checkpoint, "run.name": name, **more}
        return PlannedRun(name=name, title=where, mapping=mapping, flags=flags, after=after, from_step=step if after else 0)

    def title(name: str) -> str:
        return f"{Path(name).stem} x {processes}"

    # One process, or few, is the reference. Where texts are generated, evaluations are few.
    ends = {"eval.at_start": True}
    each, some = (ends | {"eval.every_steps": steps} for steps in (1, 3))
    runs = [planned("reference", title_of_few, few, _flags(box, rows=rows, micro=4) | ends)]
    if takes_ddp and not any(mapping["distributed_type"] == "MULTI_GPU" for _, mapping in chosen):
        runs.append(planned("ddp", title("ddp"), ddp, _flags(box, rows=rows, micro=2) | each))
    for place, (name, mapping) in enumerate(chosen):
        flags = _flags(box, rows=rows, micro=1 + place % 2) | (each if place else ends)
        runs.append(planned(f"preset-{place}", title(name), mapping, flags))
    # Resumes, not evaluated before the end: on few processes, and with dropout on the same processes, twice.
    moved, saved_again = _flags(box, rows=rows, micro=2), {"checkpoint.every_steps": 1}
    where = f"{title(main_name)}, resumed"
    runs += [
        planned("resharded", f"{where} by {title_of_few}", few, moved, after=EXPORTED),
        planned("dropout", f"{title(main_name)}, dropout {DROPOUT}", main_mapping, dropout | some),
        planned("resumed", where, main_mapping, dropout | saved_again, after="dropout"),
        planned("resumed-again", f"{where} again", main_mapping, dropout, after="resumed", step=SAVED_AGAIN),
    ]
    # Under DDP the same elements are dropped, but not by compiled blocks.
    if takes_ddp and main_mapping["distributed_type"] == "FSDP" and not main_mapping.get("dynamo_config"):
        runs.append(planned("ddp-dropout", f"{where} by ddp, dropout {DROPOUT}", ddp, dropout | each, after="dropout"))
    # With dropout, once more without recomputation, for each preset that recomputes activations.
    for place, (name, mapping) in enumerate(chosen):
        fsdp = mapping.get("fsdp_config") or {}
        recomputing = {key: False for key in fsdp if key.removeprefix("fsdp_") == "activation_checkpointing" and fsdp[key]}
        if recomputing:
            where, keeping = f"{title(name)}, dropout {DROPOUT}", mapping | {"fsdp_config": fsdp | recomputing}
            runs += [planned(f"recomputed-{place}", where, mapping, dropout)] if place else []  # the first is `dropout`
            runs.append(planned(f"kept-{place}", f"{where}, not recomputed", keeping, dropout))
    if box.in_bf16:
        runs.append(planned("bf16", f"{title(main_name)}, bf16", main_mapping | {"mixed_precision": "bf16"}, moved))
    return {run.name: run for run in runs}


def launch_all(box: Box, plans: dict[str, PlannedRun], launch: Launch, launch_resumed: Launch) -> Iterator[WatchedRun]:
    """Launch the runs one after the other, and print how long each took. `launch_resumed` starts the run `resumed`, which is
    compared bit for bit.

    Raises:
        UserError: the first run refuses the settings; that is the user's mistake and no failed check.
    """
    width = max(len(plan.title) for plan in plans.values())
    failures: dict[str | None, str | None] = {}
    for number, plan in enumerate(plans.values(), start=1):
        records, log = box.output / "records" / plan.name, box.output / "logs" / f"{plan.name}.txt"
        preset = save_preset(plan.mapping, box.output / "presets" / f"{plan.name}.yaml")
        flags = [f"--{key}={value if isinstance(value, str | Path) else json.dumps(value)}" for key, value in plan.flags.items()]
        command = ["-m", "toolkit.tools.verify.watched_run", str(box.recipe), str(records), *box.arguments, *flags]
        print(f"run {number} of {len(plans)}: {plan.title:<{width}}", end="  ", flush=True)

        # Launch it, unless the run whose checkpoint it loads has failed.
        start_s, failure = time.perf_counter(), None if failures.get(plan.after) is None else ""
        if failure is None and (launch_resumed if plan.name == "resumed" else launch)(preset, command, log):
            failure = _failure(records, log)
        took = f"{time.perf_counter() - start_s:5.1f} s{'  failed' if failure else ''}"
        print("not started" if failure == "" else took, flush=True)

        # A refusal of the first run is raised; other failures are rows of the table.
        if failure and number == 1 and f"error: {failure}" in log.read_text(encoding="utf-8", errors="replace").split("\n"):
            raise UserError(failure)
        failures[plan.name] = failure
        # Checkpoints of this run and of the one it loaded, unless needed: all together might fill the disk.
        needed = {None, *(later.after for later in list(plans.values())[number:])}
        for name in set() if failure is not None else {plan.name, plan.after} - needed:
            shutil.rmtree(box.output / "runs" / str(name) / "checkpoints", ignore_errors=True)
        yield WatchedRun(plan, box.output / "runs" / plan.name, records, failure)


def _failure(records: Path, log: Path) -> str:
    """The error that ended a run: that of the rank that failed first."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in records.glob("failed-*.json")]
    return min(failures, key=lambda about: about["time_s"])["reason"] if failures else reason_of_failure(log)


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
        **({"adapter.dropout": own_dropout, "export.merge": True, "export.merge_into": "dequantized"} if has_adapter else {}),
        "train.max_steps": NUM_STEPS,
        "train.num_epochs": None,
        "train.global_batch_size_rows": rows,
        "train.global_batch_size_tokens": None,
        "train.micro_batch_size_rows": micro,
        "optim.lr": min(float(config.optim.lr), LARGEST_LR),
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
