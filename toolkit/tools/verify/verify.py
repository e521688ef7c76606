"""`python -m toolkit verify`: launches short runs of the recipe with the user's model, and prints a table of what they prove."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from toolkit.config.load import load_config
from toolkit.config.python import CONFIGS
from toolkit.errors import UserError, align, escape_controls, one_line, refusal_named
from toolkit.models.config import load_model_config
from toolkit.models.position_limits import num_positions
from toolkit.objectives import objective_of
from toolkit.tools import forks, preset_runs
from toolkit.tools.recipes import SHIPPED, find_recipe
from toolkit.tools.verify.checks import check_all
from toolkit.tools.verify.proofs import Proof
from toolkit.tools.verify.runs import Box, Launch, WatchedRun, launch_all, plan_runs

DEFAULT_TOLERANCE = 1e-5
SMALL_ROWS = {"t5": "docstrings", "llm": "functions", "dpo": "pairs", "dpo_t5": "pairs"}
"""Files in `recipes/sources/` of the rows without a run YAML: docstrings and functions of this Python."""


def verify(run_arguments: list[str], *, tolerance: float = DEFAULT_TOLERANCE, launch: Launch | None = None, **asked: Any) -> bool:
    """Launch the runs, compare them and print the table; returns whether all checks passed. The table is also in `output`.
    `launch` starts each run; None: by forks, and one by `accelerate launch`. Settings that a run would refuse, or more processes
    than GPUs, are a `UserError`."""
    box = build_box(run_arguments, **asked)
    plans = plan_runs(box)
    _clear(box.output)
    where = "the CPU, fp32" if box.use_cpu else "GPUs, fp32 (products in ieee precision, attention by torch's math kernel)"
    what = f"{box.config.model.name_or_path} by recipes/{box.recipe.name}, {box.num_processes} processes on {where}"
    print(one_line(f"{what}: {len(plans)} runs"), flush=True)
    launches = (launch, launch) if launch else (forks.launch, preset_runs.launch)
    runs = {run.name: run for run in launch_all(box, plans, *launches)}

    proofs = compare(box, runs, tolerance)
    passed = all(proof.passed for proof in proofs)
    _show(proofs, runs["reference"].title, box.output, passed)
    return passed


def compare(box: Box, runs: dict[str, WatchedRun], tolerance: float) -> list[Proof]:
    """The rows of all checks of what the runs have left."""
    from toolkit.tools.verify.plain_checks import check_plain  # this import takes seconds

    expects_frozen = box.config.adapter.method != "none" or bool(box.config.model.freeze)
    proofs = check_all(runs, tolerance, box.config.optim, expects_frozen=expects_frozen)
    return proofs + check_plain(runs, box.config, tolerance, on_cpu=box.use_cpu or box.sharded)


def build_box(
    run_arguments: list[str],
    *,
    model: str | None = None,
    config: str | None = None,
    recipe: str | None = None,
    presets: list[str] | None = None,
    num_processes: int | None = None,
    use_cpu: bool = False,
    bf16: bool = False,
    sharded: bool = False,
    output: Path = Path("runs/verify"),
) -> Box:
    """What to verify; the arguments are those of the command line, the errors those of `verify`."""
    if any(argument.partition("=")[0] == "--model.name_or_path" for argument in run_arguments):
        raise UserError("--model.name_or_path is given: give the model as --model, from which verify chooses recipe and weights")

    # The model chooses the recipe, and with it the default rows.
    if model is None and config is None:
        model = str(SHIPPED / "recipes" / "models" / "t5_gelu")
        run_arguments = ["--model.from_scratch=true", *run_arguments]
    name = find_recipe([f"--config={config}"] if config else [], recipe, model)
    of_sides = ["--data.max_source_length_tokens=64", "--data.max_target_length_tokens=32"]
    lengths = of_sides if name in ("t5", "dpo_t5") else ["--data.max_length_tokens=128"]
    small_rows = [f"--data.source={SHIPPED}/recipes/sources/{SMALL_ROWS[name]}.py:load_rows", *lengths]
    given = [f"--config={config}"] if config else small_rows
    arguments = [*given, *([f"--model.name_or_path={model}"] if model else []), *run_arguments]
    # Every config needs a length; that of the runs is set later.
    parsed = load_config(CONFIGS[name], arguments if config else ["--train.max_steps=1", *arguments])
    if "flash" in (attention := parsed.model.attn_implementation or ""):
        why = "which cannot compute in fp32, but verify does, to separate rounding from mistakes"
        raise UserError(f"model.attn_implementation is {attention}, {why}: add --model.attn_implementation null")
    # Where, and with how many processes.
    num_gpus, fewest = torch.cuda.device_count(), 3 if sharded else 2
    on_cpu = use_cpu or num_gpus == 0
    chosen = num_processes if num_processes is not None else (fewest if on_cpu else num_gpus)
    if chosen < fewest:
        what = "them with one fewer, as --sharded asks" if sharded else "several with one"
        remedy = f"give {fewest} or more, with --use-cpu if need be"
        raise UserError(f"--num-processes is {chosen}, but verify compares {what}: {remedy}")
    if not on_cpu and chosen > num_gpus:
        raise UserError(f"--num-processes is {chosen}, but there are {num_gpus} GPUs here: give fewer, or --use-cpu")
    return Box(
        recipe=SHIPPED / "recipes" / f"{name}.py",
        arguments=arguments,
        config=parsed,
        num_positions=num_positions(load_model_config(parsed.model, objective_of(parsed)))[0],
        presets=presets or ["fsdp2_full_shard"],
        num_processes=chosen,
        use_cpu=on_cpu,
        output=output.absolute(),
        in_bf16=bf16,
        sharded=sharded,
    )


def _clear(output: Path) -> None:
    """Create the folder, or remove what an earlier `verify` left in it."""
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / "verify.json").exists())):
        raise UserError(f"--output {output} exists and is not from an earlier verify: take another folder")
    for name in ("runs", "records", "logs", "presets"):
        shutil.rmtree(output / name, ignore_errors=True)
    with refusal_named(f"--output {output} cannot be written", "name a folder that you can write to"):
        output.mkdir(parents=True, exist_ok=True)
        (output / "verify.md").unlink(missing_ok=True)
        (output / "verify.json").write_text('{"passed": null}\n', encoding="utf-8")


def _show(proofs: list[Proof], reference: str, output: Path, passed: bool) -> None:
    """Print the table and write it. If all checks passed, remove the runs: they are as large as their checkpoints."""
    # The table, and a line for each cause of failures.
    titles = ("check", f"compared with {reference}, or as said", "difference", "tolerance", "")
    lines = align([titles, *(_cells(proof) for proof in proofs)], left=range(len(titles)))
    failed = [proof for proof in proofs if proof.is_reached and not proof.passed]
    causes: dict[tuple[str, str], list[str]] = {}
    for proof in failed:
        causes.setdefault((proof.check, proof.detail), []).append(proof.compared)
    lines += ["", *(f"FAILED {check} ({'; '.join(where)}): {detail}" for (check, detail), where in causes.items())]
    open_checks = dict.fromkeys(proof.check for proof in proofs if not proof.is_reached)
    if passed:
        lines.append(f"all {len(proofs)} proven")
    else:
        names = ", ".join(dict.fromkeys(proof.check for proof in failed))
        lines.append(f"FAILED: {names}" + (f"; not reached: {', '.join(open_checks)}" if open_checks else ""))
    text = "\n".join(lines)

    print(escape_controls(f"\n{text}"))
    (output / "verify.md").write_text(f"```\n{text}\n```\n", encoding="utf-8")
    # JSON cannot express infinities.
    rows = [vars(proof) | {"difference": None if proof.difference == math.inf else proof.difference} for proof in proofs]
    about = {"passed": passed, "proofs": rows}
    (output / "verify.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if passed:
        shutil.rmtree(output / "runs")
        shutil.rmtree(output / "records")
    else:
        print(one_line(f"{output} has the runs' output and files"))


def _cells(proof: Proof) -> tuple[str, ...]:
    def number(value: float) -> str:
        if proof.check == "sharding":
            return f"{value:.1%}"
        return f"{value:.0f}" if value % 1 == 0 else f"{value:.1e}"  # a count, or none

    state = "passed" if proof.passed else ("FAILED" if proof.is_reached else "not reached")
    if proof.difference is None:
        return proof.check, proof.compared, "-", "-", state
    tolerance = "exact" if proof.tolerance == 0 else number(proof.tolerance)
    return proof.check, proof.compared, number(proof.difference), tolerance, state
