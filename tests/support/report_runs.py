"""Run folders for `report.html`, without a run."""

import json
import math
from pathlib import Path

from tests.support.checkpoint_files import change_manifest, make_checkpoint

HOSTILE = "</script><script>alert(1)</script><!-- <script> \u202egnp.exe\u2066 \ud800 & <img src=x onerror=alert(1)>"

DATA = {
    "readings": ["a.csv: column text"], "remarks": [], "duplicates": [], "sources": [], "fingerprint": "f", "tokenizer": "T5",
    "special_tokens": [], "stop_tokens": [],
    "splits": [{"name": "training", "num_rows": 1234, "num_tokens": 9, "num_label_tokens": 4}], "chat_template": False,
    "lengths": [{"name": "row", "setting": None, "percentiles": {"0": 1, "50": 7}, "bins": [[0, 9, 3]]}],
}  # fmt: skip
UNIT = {"unit": "T5Block", "count": 2, "num_parameters": 10, "num_trainable": 5, "dtypes": ["float32"], "bytes_on_rank_0": 9}


def evaluation(step: int, **figures) -> dict:
    """A line of metrics.jsonl; all are of the same rows, unless `measured_on` says otherwise."""
    return {"kind": "eval", "step": step, "num_rows": 2, "measured_on": {"rows": "a"}, **figures}


def train(step: int, loss: float | None = 2.0, **changes: float) -> dict:
    figures = {"learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_s": 5e3, "step_time_s": 0.1, "peak_memory_gib": 1.0}
    return {"kind": "train", "step": step, "loss": loss, **figures, **changes}


def save_run(folder: Path, *lines: dict, lr: float = 0.1, predictions: dict[int, list[str]] | None = None) -> Path:
    """A run folder with these lines of metrics.jsonl. After training, the rows' scores are in the opposite order."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"optim:\n  lr: {lr}\n  beta1: 0.9\neval:\n  best_metric: rougeL\n")
    for step, texts in (predictions or {}).items():
        rows = [
            {"row_id": i, "reference": f"reference {i}", "prediction": text, "rougeL": 10.0 * (len(texts) - i if step else i)}
            for i, text in enumerate(texts)
        ]
        (folder / f"predictions-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_whole_run(folder: Path, num_steps: int = 2) -> Path:
    """A run with something in each section of its page, and a hostile text in its last prediction and source."""
    every = max(1, num_steps // 10)
    noise = [math.sin(step * 12.9898) * 0.1 for step in range(num_steps + 1)]
    lines = [
        evaluation(step, loss=2 + math.exp(-step / 60), rougeL=1 + 8 * step / num_steps) for step in range(0, num_steps, every)
    ]
    lines += [evaluation(num_steps, loss=2.0, rougeL=9.0)]
    lines += [
        train(
            step, 2 + math.exp(-step / 60) + noise[step], learning_rate=1e-3 * (1 - step / num_steps), grad_norm=1 + noise[step]
        )
        for step in range(1, num_steps + 1)
    ]
    lines += [{"kind": "checkpoint", "step": num_steps}, {"kind": "skip", "step": 1}, {"kind": "resume", "step": num_steps // 2}]
    lines += [{"kind": "baseline", "step": num_steps, "name": "lead sentence", "rougeL": 17.0, "measured_on": {"rows": "a"}}]
    run = save_run(folder, *lines, predictions={0: ["a", "b"], num_steps: ["c", HOSTILE]})
    record = {"versions": {"torch": "2.13"}, "command": "accelerate launch recipes/t5.py", "num_processes": 2}
    record |= {"units": [UNIT], "sources": {"0": "source 0", "1": HOSTILE}, "data": DATA}
    (run / "record.json").write_text(json.dumps(record))
    memory = {"device": "cuda", "peak_gib": [1.0, 2.0], "num_processes": 2}
    shape = {"num_processes": 2, "micro_batch_size_rows": 1, "row_tokens": {"row": 1}}
    (run / "memory.json").write_text(json.dumps({**memory, **shape}))
    (run / "memory_plan.json").write_text(json.dumps({**shape, "device_bytes_total": 3 * 2**30}))
    return run


def save_distinct_run(folder: Path) -> Path:
    """A run in which no figure is another one's, but that its best ROUGE-L came twice, and that evaluated other rows at first."""
    lines = [evaluation(0, loss=9.0, rougeL=90.0, measured_on={"rows": "b"})]
    for step, loss, rouge1, rougeL in ((2, 3.0, 41.0, 20.0), (4, 2.5, 42.0, 30.0), (6, 2.75, 43.0, 30.0)):
        lines += [evaluation(step, loss=loss, rouge1=rouge1, rougeL=rougeL), {"kind": "checkpoint", "step": step}]
    names = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_time_s", "peak_memory_gib")
    for step in range(1, 7):
        lines.append(train(step, **{name: 10.0 * place + step for place, name in enumerate(names, start=1)}))
    lines += [{"kind": "skip", "step": 3}, {"kind": "resume", "step": 5}]
    for rows, figures in (("a", {"rouge1": 44.0, "rougeL": 17.0}), ("b", {"rougeL": 99.0})):
        lines.append({"kind": "baseline", "step": 6, "name": f"of rows {rows}", "measured_on": {"rows": rows}, **figures})
    run = save_run(folder, *lines)
    with (run / "config.yaml").open("a") as config:
        config.write("train:\n  max_steps: 8\n")
    (run / "record.json").write_text(json.dumps({"num_processes": 2}))
    for step, rougeL, best in ((2, 20.0, 20.0), (4, 30.0, 30.0), (6, 29.0, 30.0)):
        measured = {"metrics": {"rougeL": rougeL}, "state": {"best_value": best}}
        change_manifest(make_checkpoint(run, step), lambda manifest, measured=measured: manifest.update(measured))
    return run


def long_texts() -> list[str]:
    """1,000 texts that begin with their number; one has a megabyte, and `<` as well as words from right to left."""
    return [f"{i} " + "<ابجد" * 200_000 if i == 7 else f"{i} " + "<語ß " * 500 for i in range(1000)]


def save_long_run(folder: Path) -> Path:
    """10,000 steps with one spike of the loss, and `long_texts` as predictions and sources."""
    figures = {"bits_per_byte": 1.0, "token_accuracy": 9.0, "rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "exact_match": 0.0}
    lines = [train(step, 2.0 + step % 7 / 10) for step in range(1, 10_001)]
    lines[6122]["loss"] = 1000.0
    lines += [evaluation(step, loss=2.0, **figures) for step in range(0, 10_001, 500)]
    texts = long_texts()
    run = save_run(folder, *lines, predictions={0: texts, 10_000: texts})
    (run / "record.json").write_text(json.dumps({"sources": {str(i): text[:4001] for i, text in enumerate(texts)}}))
    return run
