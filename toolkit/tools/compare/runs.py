"""`python -m toolkit compare`: runs a recipe under several presets, and writes a table, a picture and JSON."""

import json
import logging
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError, escape_controls, one_line, refusal_named
from toolkit.launch.accelerate_yaml import SECTIONS, check_accelerate_yaml, check_mapping
from toolkit.launch.environment import slow_bf16
from toolkit.tools.compare import table
from toolkit.tools.compare.table import Outcome
from toolkit.tools.preset_runs import adapt_preset, find_preset, launch, reason_of_failure, save_preset

logger = logging.getLogger("toolkit")

CHANGES_NOT_SHOWN = ("main_process_ip", "main_process_port", "machine_rank")


def compare(command: list[str], *, presets: Sequence[str], output: Path, num_steps: int, warmup_steps: int, **given: Any) -> bool:
    """Run the recipe's `command` under each preset, as `load_preset` reads it, for `num_steps` optimizer updates, of which the
    first `warmup_steps` are not timed; print the table and write it into `output`. Returns whether all runs succeeded. `given` is
    what `_run` changes in each preset.

    `output` is a new folder. It gets comparison.md, comparison.json, comparison.png, and each run's folder, accelerate YAML and
    log. An unknown preset, a change to an unknown key, nothing to time, a folder that is not empty or cannot be created are a
    `UserError` before anything runs.
    """
    if not command:
        raise UserError("compare needs a recipe after its own options: add -- recipes/t5.py --config RUN.yaml")
    if num_steps <= warmup_steps:
        raise UserError(f"--steps {num_steps} leaves no step to time after --warmup-steps {warmup_steps}: give more")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists and is not an empty folder: name a new one")
    mappings = {preset: load_preset(preset) for preset in presets}
    with refusal_named(f"--output {output} cannot be made", "name a folder that you can write to"):
        output.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"command": command, "num_steps": num_steps, "warmup_steps": warmup_steps}
    outcomes: list[Outcome] = []
    for place, (preset, mapping) in enumerate(mappings.items(), start=1):
        start_s = time.perf_counter()
        name = f"{place}-{Path(preset.partition(':')[0]).stem}"
        logger.info(f"{place}/{len(mappings)} {preset}: running, output in {output / name}.log")
        outcomes.append(_run(preset, mapping, output / name, **about, **given))
        how = f"failed: {outcomes[-1].failure}" if outcomes[-1].failure else "done"
        logger.info(f"{place}/{len(mappings)} {preset}: {how} ({time.perf_counter() - start_s:.0f} s)")
    _report(outcomes, about, output)
    return all(outcome.failure is None for outcome in outcomes)


def load_preset(preset: str) -> dict[str, Any]:
    """The accelerate YAML named before the colon, with the changes after it, as in `NAME:key=value+key=value`. If there is none,
    a change is not `key=value`, or the result is not valid, that is a `UserError`."""
    name, _, changes = preset.partition(":")
    mapping = check_accelerate_yaml(find_preset(name))
    for change in filter(None, changes.split("+")):
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--presets {preset}: {change} is not a change: write key=value, as in fsdp_offload_params=true")
        section = next((section for section, prefix in SECTIONS.items() if key.startswith(prefix)), None)
        # Not parsed as YAML, which reads `no` as false.
        parsed: Any = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
        mapping = mapping | ({section: {**(mapping.get(section) or {}), key: parsed}} if section else {key: parsed})
    check_mapping(mapping, f"--presets {preset}")
    return mapping


def _run(
    preset: str,
    mapping: dict[str, Any],
    folder: Path,
    *,
    command: list[str],
    num_steps: int,
    warmup_steps: int,
    num_processes: int | None = None,
    use_cpu: bool = False,
    mixed_precision: str | None = None,
) -> Outcome:
    """Launch the recipe, which makes `folder`, and read its metrics; a failure is an outcome too. Without `num_processes` the
    preset keeps its number, or takes that of the GPUs (on the CPU: cores) if it is smaller; a `mixed_precision`, `no` or `bf16`,
    replaces its own."""
    # The preset as it can run here.
    adapted, failure = mapping, None
    try:
        use_cpu = use_cpu or mapping.get("use_cpu", False)
        num_gpus, own = torch.accelerator.device_count(), mapping.get("num_processes", 1)
        num_here = (os.cpu_count() or 1) if use_cpu else num_gpus
        chosen = num_processes or (min(own, num_here) if num_here else own)
        adapted = adapt_preset(mapping, num_processes=chosen, use_cpu=use_cpu)
        adapted |= {"mixed_precision": mixed_precision} if mixed_precision else {}
        path = save_preset(adapted, folder.with_name(f"{folder.name}.yaml"))
        if slow := slow_bf16(adapted):
            logger.warning(f"{preset}: {slow}")
        # Raised here, because the ranks would do so only after seconds of imports.
        wanted = adapted.get("num_processes", 1)
        if adapted["distributed_type"] != "NO" and not adapted.get("use_cpu") and num_gpus < wanted:
            seen = num_gpus or "none"
            raise UserError(f"it needs {wanted} GPUs, but torch sees {seen} here: add --use-cpu, or give fewer --num-processes")
    except UserError as error:
        failure = str(error)
    about: dict[str, Any] = {
        "preset": preset,
        "num_processes": adapted.get("num_processes", 1),
        "precision": adapted.get("mixed_precision") or "no",
        "changes": _changes(mapping, adapted),
    }
    if failure is not None:
        return Outcome(**about, failure=failure)

    # Launch, and read the metrics.
    flags = {
        "run.output_dir": folder.parent,
        "run.name": folder.name,
        "train.num_epochs": "null",
        "train.max_steps": num_steps,
        # One log line after the warm-up, and then as rarely: each reads the device, and times are known per log line.
        "log_every_steps": warmup_steps or num_steps,
    }
    log_path = folder.with_name(f"{folder.name}.log")
    if launch(path, [*command, *(f"--{key}={value}" for key, value in flags.items())], log_path):
        return Outcome(**about, failure=reason_of_failure(log_path))
    try:
        return Outcome(**about, figures=table.read_figures(folder / "metrics.jsonl", warmup_steps))
    except (OSError, ValueError) as error:
        return Outcome(**about, failure=f"no figures: {error}")


def _changes(mapping: dict[str, Any], adapted: dict[str, Any]) -> list[str]:
    """The differences between two accelerate YAMLs, as in "num_processes 8 → 2"."""

    def spelt(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    changes = []
    for key, value in adapted.items():
        before = mapping.get(key)
        if isinstance(value, dict):
            changes += _changes(before or {}, value)
        elif value != before and key not in CHANGES_NOT_SHOWN and (before, value) != (None, 1):
            changes.append(f"{key} {spelt(before)} → {spelt(value)}")
    return changes


def _report(outcomes: list[Outcome], about: dict[str, Any], output: Path) -> None:
    """Print the table, and write it with the picture and the JSON."""
    ran = table.presets_that_ran(outcomes)
    reference = next(iter(ran), None)
    heading = f"{Path(about['command'][0]).name}: {about['num_steps']} steps, timed from step {about['warmup_steps'] + 1} on"
    remarks = [f"loss difference: the largest over the steps, relative to {reference}"] if reference else []
    if changes := table.common_changes(outcomes):
        remarks.append(f"changed in all presets: {', '.join(changes)}")
    text = f"{'; '.join([heading, *remarks])}.\n\n{table.format_comparison(outcomes)}"
    (output / "comparison.md").write_text(f"`{shlex.join(about['command'])}`\n\n{text}\n", encoding="utf-8")
    plain = {**about, "compared_with": reference, "presets": table.as_json(outcomes)}
    (output / "comparison.json").write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    table.draw_comparison(ran, heading, output / "comparison.png")
    picture = ", comparison.png" if (output / "comparison.png").exists() else ""
    written = f"written to {one_line(str(output))}: comparison.md, comparison.json{picture}"
    print(escape_controls(f"\n{text}\n\n{written}"), flush=True)
