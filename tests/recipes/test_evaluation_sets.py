"""Named evaluation sets on 2 FSDP ranks: figures as of a run that evaluates the set alone, which choose, prune and stop."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.recipes.test_best_weights import WORSENING
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.rank import PAGES
from tests.support.workbench import Workbench
from toolkit.evaluation.generate import FLAWS
from toolkit.files.json_lines import load_json_lines

ALONE: dict[str, Any] = {"train__max_steps": 0, "eval__at_start": True, "eval__num_rows": None}
OF_ALL = ("kind", "step", "num_rows", "num_texts", *FLAWS, "rows_per_s", "rouge_tokenizer", "measured_on")


def test_a_set_has_the_figures_of_a_run_of_its_own_and_its_loss_chooses_prunes_and_stops(workbench: Workbench) -> None:
    mail = make_rows(8, seed=2)
    files = {
        "news": [save_jsonl(workbench.runs / "news.jsonl", make_rows(13, seed=1))],
        "mail": [save_jsonl(workbench.runs / f"mail-{i}.jsonl", rows) for i, rows in enumerate((mail[:3], mail[3:]))],
    }
    named = {name: [str(path) for path in paths] for name, paths in files.items()}
    of_run = {**WORSENING, "eval__generate": True, "eval__num_rows": None, "eval__batch_size_rows": 4}
    printed = workbench.run("run", env=PAGES, data__eval_files=named, eval__best_metric="mail/loss", **of_run)

    # Early stop, pruning and export go by the loss of one set.
    lines = {line["step"]: line for line in workbench.lines("run", "eval")}
    best = min((step for step in lines if step), key=lambda step: lines[step]["mail/loss"])
    assert list(lines) == [0, 1, 2, 3, 4] and best == 1
    assert "stopping at step 4: 3 evaluations without gain in mail/loss\n" in printed
    assert workbench.checkpoints("run") == ["step-00000001", "step-00000004"]
    assert (
        f"exporting the weights of step 1, the best mail/loss ({lines[1]['mail/loss']:.4g}) of the checkpoints kept\n" in printed
    )
    assert "21 held-out rows (13 of news, 8 of mail), " in printed

    # Each set alone, by one process, on the exported weights; and all rows as a list.
    everything = [path for paths in named.values() for path in paths]
    of_name = {"model": workbench.runs / "run" / "export", "eval__batch_size_rows": 64} | ALONE
    places = {**named, "": everything}
    workbench.run_all({f"alone {name}": of_name | {"data__eval_files": paths} for name, paths in places.items()}, preset="single")
    for name in places:
        (alone,) = workbench.lines(f"alone {name}", "eval")
        figures = {key: value for key, value in alone.items() if key not in OF_ALL}
        assert {"loss", "perplexity", "token_accuracy", "rouge1", "rougeL", "exact_match"} <= figures.keys()
        found = {key: lines[best][f"{name}/{key}" if name else key] for key in figures}
        for row in (found, figures):
            row["perplexity"] = math.log(row["perplexity"])  # e^loss: a loss of 24 makes 24 of each part that differs
        assert found == pytest.approx(figures, rel=1e-6)

    # What else names the sets.
    predictions = load_json_lines(workbench.runs / "run" / f"predictions-{best}.jsonl")
    assert [row["set"] for row in predictions] == ["news"] * 13 + ["mail"] * 8
    for label in ("news: before training", "mail: after step 4", "mail: lead sentence"):
        assert f"\n{label} " in printed
    page = (workbench.runs / "run" / "report.html").read_text()
    assert "mail: after step 4" in page
