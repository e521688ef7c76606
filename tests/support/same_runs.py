"""Whether a run is the one that nothing interrupted, bit for bit: its figures, rows and checkpoints."""

import hashlib
import json
from pathlib import Path

from tests.support.workbench import Workbench
from toolkit.files.json_lines import load_json_lines

CURVES = ("step", "epoch", "loss", "learning_rate", "grad_norm", "num_rows", "num_input_tokens_seen")


def check_same(bench: Workbench, name: str, whole: str, *steps: int) -> None:
    """Curves, evaluations, rows and checkpoints of `steps` are those of another run, bit for bit, and none is there twice."""
    for kind, of_line in (("train", curves), ("eval", without_speed), ("skip", dict)):
        assert list(map(of_line, bench.lines(name, kind))) == list(map(of_line, bench.lines(whole, kind))), kind
    rows = sorted((bench.runs / whole).glob("rows-*.jsonl"))
    assert rows, "no rows were logged"
    for path in rows:
        assert (bench.runs / name / path.name).read_text() == path.read_text(), "rows were lost or taken twice"
    for step in steps:
        assert saved_state(bench.checkpoint(name, step)) == saved_state(bench.checkpoint(whole, step))


def curves(line: dict) -> dict:
    return {name: line[name] for name in CURVES}


def without_speed(figures: dict) -> dict:
    return {key: value for key, value in figures.items() if not key.endswith("_per_s")}


def saved_state(folder: Path) -> dict:
    """Hashes of all shards (weights and moments) and random states, by file name (DCP's index holds an id that is drawn), and
    what the manifest says of the run, except for speeds."""
    files = [*folder.glob("state/*.distcp"), *folder.glob("rng-*.safetensors")]
    assert files, folder
    manifest = read_manifest(folder)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"step": manifest["step"], "state": manifest["state"], "metrics": without_speed(manifest["metrics"]), **hashes}


def read_manifest(folder: Path) -> dict:
    manifest = json.loads((folder / "manifest.json").read_text())
    return manifest


def rows_by_place(run_folder: Path) -> dict[tuple[str, int, int], list[int]]:
    """Row ids by (rank, step, micro-batch); where a step ran twice, those of the second time."""
    rows = {}
    for path in sorted(run_folder.glob("rows-*.jsonl")):
        for line in load_json_lines(path):
            rows[path.stem, line["step"], line["micro_batch"]] = line["row_ids"]
    return rows


def rows_by_step(run_folder: Path) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for (_, step, _), row_ids in rows_by_place(run_folder).items():
        steps[step] = sorted(steps.get(step, []) + row_ids)
    return steps
