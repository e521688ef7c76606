"""The generated texts of a page: before and after training, or the last ones of several runs, as data for its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.tools.report.facts import RunFacts, is_number, name_step, read_predictions
from toolkit.tools.report.record import LONGEST_TEXT

MOST_BYTES = 2_500_000
"""Of all texts of a page, as they are written there."""
_SHORTEST_TEXT = 60


def collect_predictions(runs: Sequence[RunFacts]) -> dict[str, Any] | None:
    """Rows with their source, reference and one text per column; None if no run has generated texts.

    The columns are a run's first and last predictions, or the last ones of each of several runs, matched by row and reference.
    """
    columns = []
    for run in runs:
        found = [(step, rows) for step in _ends(run) if (rows := read_predictions(run, step)) is not None]
        chosen = found[-1:] if len(runs) > 1 else found
        kept = run.record.get("sources")
        sources = {row_id: text for row_id, text in kept.items() if isinstance(text, str)} if isinstance(kept, dict) else {}
        columns += [(run.prefix + name_step(step), rows, sources) for step, rows in chosen]
    return _shortened(_rows(columns), [label for label, *_ in columns]) if columns else None


def _ends(run: RunFacts) -> list[int]:
    """The first and the last evaluation of the same rows that have a file of predictions."""
    steps = [line["step"] for line in run.comparable if (run.folder / f"predictions-{line['step']}.jsonl").is_file()]
    return list(dict.fromkeys([*steps[:1], *steps[-1:]]))


def _rows(columns: list[tuple[str, list[dict[str, Any]], dict[str, str]]]) -> list[dict[str, Any]]:
    """A row is known by its id and its reference: other runs may number other rows. Its source is of a run that has this row."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for place, (_, predictions, sources) in enumerate(columns):
        for number, prediction in enumerate(predictions):
            row_id, reference = str(prediction.get("row_id", number)), str(prediction.get("reference", ""))
            empty = {"texts": [None] * len(columns), "scores": [{} for _ in columns]}
            shown_id = f"{row_id}, {prediction['set']}" if "set" in prediction else row_id
            row = rows.setdefault((row_id, reference), {"id": shown_id, "reference": reference, "source": None, **empty})
            row["source"] = row["source"] or sources.get(row_id)
            row["texts"][place] = prediction["prediction"]
            row["scores"][place] = {name: round(v, 2) for name, v in prediction.items() if name != "row_id" and is_number(v)}
    return list(rows.values())


def _shortened(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    """The rows with their texts cut at one length, the longest with which all fit into `MOST_BYTES`."""
    limit = LONGEST_TEXT
    while len(as_json(shown := [_cut(row, limit) for row in rows]).encode()) > MOST_BYTES:
        if limit > _SHORTEST_TEXT:
            limit = limit * 3 // 4
        else:
            rows = rows[::2]
    num_cut = sum(row["is_cut"] for row in shown)
    metrics = list(dict.fromkeys(name for row in shown for scores in row["scores"] for name in scores))
    return {"columns": columns, "metrics": metrics, "rows": shown, "limit": limit, "num_cut": num_cut}


def _cut(row: dict[str, Any], limit: int) -> dict[str, Any]:
    texts = [row["source"], row["reference"], *row["texts"]]
    source, reference, *predictions = (text if text is None or len(text) <= limit else f"{text[: limit - 1]}…" for text in texts)
    is_cut = any(text is not None and len(text) > limit for text in texts)
    return {**row, "source": source, "reference": reference, "texts": predictions, "is_cut": is_cut}


def as_json(value: Any) -> str:
    """JSON for a script element: no `<`, so that no text ends the element, and half surrogate pairs as escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", errors="backslashreplace").decode()
