"""A cell of the support table: a tiny run on two ranks under FSDP2, which is stopped, resumed and exported."""

import json
import os
import shutil
from pathlib import Path

from tests.families.families import FROZEN, NUM_STEPS
from tests.support.model_folders import LANGUAGES
from tests.support.small_run import without_export
from toolkit.files.json_lines import load_json_lines

TOLERANCE = 1e-5
"""Largest relative difference of a loss from that of plain training."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference of the export's logits from the trained model's, as a share of the largest."""


def run_cell(family: str, recipe: str, settings: dict, folder: Path, kind: str) -> str:
    """On every rank: train to the end; then take the last checkpoint away, resume from the one before, and export.

    Returns:
        What is wrong with the cell; empty if nothing is, and on other ranks than the first.
    """
    import toolkit
    from toolkit.errors import exit_on_user_error
    from toolkit.launch.log import start_logging

    is_first, run = os.environ.get("RANK", "0") == "0", folder / "runs" / settings["run.name"]
    with exit_on_user_error():
        start_logging()
        config = toolkit.load_config(recipe, overrides=settings)
        # Each export is that of a resumed run.
        with without_export():
            toolkit.finetune(config)
        before = train_lines(run) if is_first else []
        if is_first:  # before the ranks meet again
            shutil.rmtree(run / "checkpoints" / f"step-{NUM_STEPS:08d}")
        toolkit.finetune(config)
    return judge(family, folder, run, kind, before) if is_first else ""


def judge(family: str, folder: Path, run: Path, kind: str, before: list[dict]) -> str:
    """What is wrong with a run that had written the lines `before` it was resumed."""
    after = train_lines(run)
    losses = [line["loss"] for line in after]
    if after[:-1] != before[:-1]:
        return "it was not resumed: steps before the checkpoint ran again, or their times would be the same"
    if losses != [line["loss"] for line in before]:
        return f"losses are {[line['loss'] for line in before]}, those of the resumed run {losses}"
    if not losses[-1] < losses[0]:
        return f"the loss does not fall: {losses}"
    expected = plain_losses(family, folder, run, kind)
    evaluated = [line["loss"] for line in load_json_lines(run / "metrics.jsonl") if line["kind"] == "eval"][-1]
    errors = [abs(ours - plain) / plain for ours, plain in zip([*losses, evaluated], expected, strict=True)]
    if max(errors) > TOLERANCE:
        return "losses differ from plain ones by " + ", ".join(f"{error:.1e}" for error in errors)
    difference = compare_export(run, folder / "model", kind)
    return f"logits of the export differ by {difference:.1e}" if difference > LOGIT_TOLERANCE else ""


def plain_losses(family: str, folder: Path, run: Path, kind: str) -> list[float]:
    """What plain training comes to; the packed cell of a kind takes what the other has computed."""
    from tests.families.plain import train_plain

    found = folder / f"{kind}.json"
    if not found.exists():
        rows = [load_json_lines(folder / name) for name in ("rows.jsonl", "held_out.jsonl")]
        adapter, how = run / "export", (FROZEN.get(family), LANGUAGES.get(family))
        found.write_text(json.dumps(train_plain(folder / "model", kind, *rows, adapter, *how)))
    return json.loads(found.read_text())


def train_lines(run: Path) -> list[dict]:
    """A line of figures for each step, with its time."""
    return [line for line in load_json_lines(run / "metrics.jsonl") if line["kind"] == "train"]


def compare_export(run: Path, model: Path, kind: str) -> float:
    """Load the export by transformers and peft alone: the difference of its logits from those of the trained model."""
    import peft
    import torch
    from safetensors.torch import load_file

    from tests.families.plain import load_base, quantize_values

    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    if kind == "full":
        loaded = load_base(run / "export", torch.float32)
    else:
        loaded = peft.PeftModel.from_pretrained(load_base(model, torch.float32), run / "export").eval()
    if kind == "nf4":
        quantize_values(loaded)
    with torch.no_grad():
        return ((loaded(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()).item()
