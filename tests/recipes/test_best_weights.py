"""Which weights a run keeps, exports and starts from: the best that can be exported, by figures of the same rows or of one
evaluation set; those of another run. And the profiler's window.
"""

import json
import math
import shutil

import pytest

from tests.support.model_folders import make_rows, save_jsonl
from tests.support.rank import PAGES
from tests.support.workbench import Workbench
from toolkit.evaluation.generate import FLAWS
from toolkit.files.json_lines import load_json_lines

WORSENING = {
    "optim__lr": 10.0,
    "optim__warmup_steps": 2,
    "train__max_steps": 5,
    "eval__at_start": True,
    "eval__every_steps": 1,
    "eval__generate": False,
    "eval__early_stopping_patience": 3,
    "checkpoint__keep_last": 1,
    "checkpoint__keep_best": 1,
    "export__weights": "best",
}
"""Steps so large that every one of them makes the model worse than it was at the start."""


def losses(bench: Workbench, name: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in bench.lines(name, "eval")}


def test_best_is_the_best_of_what_was_saved_and_not_the_start(bench):
    worse = bench.run("worse", **WORSENING)
    start, *after = losses(bench, "worse").values()
    best = after.index(min(after)) + 1
    assert start < min(after) and best == 1, "the run is to be better at its start, and not best at its end"
    assert bench.checkpoints("worse") == ["step-00000001", "step-00000004"]
    at_best = f"at best {min(after):.4g} after it"
    gained = f"no evaluated step is better than the start: loss {start:.4g} before the first step, {at_best}\n"
    assert f"stopping at step 4: 3 evaluations without gain in loss\n{gained}" in worse
    chosen = f"exporting the weights of step {best}, the best loss ({min(after):.4g}) of the checkpoints kept\n"
    assert worse.index(gained) < worse.index(chosen)
    exported = bench.runs / "worse" / "export"
    bench.run("exported", preset="single", model=exported, train__max_steps=0, eval__generate=False)
    assert losses(bench, "exported")[0] == pytest.approx(min(after), rel=1e-5)
    assert json.loads((exported / "toolkit.json").read_text())["step"] == best
    assert f"Weights in float32, after step {best}.\n" in (exported / "README.md").read_text()


def test_a_complete_run_that_is_started_with_another_metric_measures_it(bench):
    """It trains no more, but it is evaluated again."""
    short = {"train__max_steps": 2, "checkpoint__keep_best": 0}
    bench.run("metric", **short, eval__generate=False)
    assert "rougeL" not in bench.lines("metric", "eval")[-1]
    printed = bench.run("metric", **short, eval__generate=True, eval__best_metric="rougeL")
    assert "evaluation at step 2: " in printed and "step 2/2" not in printed
    [line] = [line for line in bench.lines("metric", "eval") if line["step"] == 2]
    assert "rougeL" in line


# --- Named evaluation sets, on 2 FSDP ranks: figures as of a run that evaluates the set alone, which choose, prune and stop.

ALONE = {"train__max_steps": 0, "eval__at_start": True, "eval__num_rows": None}
OF_ALL = ("kind", "step", "num_rows", "num_texts", *FLAWS, "rows_per_s", "rouge_tokenizer", "measured_on")


def test_a_set_has_the_figures_of_a_run_of_its_own_and_its_loss_chooses_prunes_and_stops(workbench):
    mail = make_rows(8, seed=2)
    named = {
        "news": [str(save_jsonl(workbench.runs / "news.jsonl", make_rows(13, seed=1)))],
        "mail": [str(save_jsonl(workbench.runs / f"mail-{i}.jsonl", rows)) for i, rows in enumerate((mail[:3], mail[3:]))],
    }
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


# --- The weights of another run.

TAUGHT = {
    "model__freeze": [r"encoder\..*"],  # its checkpoints lack the encoder and, tied to it, all embeddings
    "optim__lr": 1e-2,
    "optim__schedule": "constant",
    "checkpoint__every_steps": 1,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 1,
    "eval__generate": False,
    "profile__steps": [2, 3],
}
ONE_MORE = {"train__max_steps": 1, "eval__at_start": True, "eval__generate": False}


@pytest.fixture(scope="module")
def taught(bench) -> Workbench:
    """The bench with a finished run `taught` on it, whose losses differ from step to step."""
    bench.run("taught", **TAUGHT)
    return bench


def test_init_from_starts_with_the_weights_of_another_run(taught):
    sources = {"taught": 3, "taught/checkpoints/step-00000001": 1, "taught/export": 3}
    names = {source: f"from_{source}".replace("/", "_") for source in sources}
    taught.run_all({name: {"model__init_from": taught.runs / source} | ONE_MORE for source, name in names.items()})
    theirs = {line["step"]: line["loss"] for line in taught.lines("taught", "eval")}
    assert len(set(theirs.values())) == 3
    for source, step in sources.items():
        assert taught.lines(names[source], "eval")[0]["loss"] == pytest.approx(theirs[step], rel=1e-6)
        assert [line["step"] for line in taught.lines(names[source], "train")] == [1]


def test_frozen_weights_come_from_init_from_on_a_resume_too(taught):
    from safetensors.numpy import load_file

    start = {
        "model__init_from": taught.runs / "taught" / "export",
        "model__freeze": [r"decoder\.block\..*"],
        "eval__generate": False,
    }
    taught.run("refrozen", train__max_steps=1, **start)
    taught.run("refrozen", train__max_steps=2, **start)
    weights = [load_file(taught.runs / run / "export" / "model.safetensors") for run in ("taught", "refrozen")]
    assert [line["step"] for line in taught.lines("refrozen", "train")] == [1, 2]
    same = {name: bool((weights[0][name] == weights[1][name]).all()) for name in weights[0]}
    assert same == {name: name.startswith("decoder.block.") for name in same}


def test_init_from_refuses_a_run_on_another_frozen_base(taught):
    from safetensors.numpy import load_file, save_file

    base = taught.runs / "other_base"
    shutil.copytree(taught.models["t5"], base)
    weights = load_file(base / "model.safetensors")
    weights["encoder.final_layer_norm.weight"] = weights["encoder.final_layer_norm.weight"] * 2
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    refused = taught.attempt("other", model=base, model__init_from=taught.runs / "taught", **ONE_MORE)
    assert ": its run had other frozen weights; take that run's model.name_or_path" in refused.refusal()


def test_profile_steps_leaves_a_trace_of_each_step_and_rank(taught):
    traces = sorted((taught.runs / "taught" / "profile").iterdir())
    assert [path.stem for path in traces] == [f"step-0000000{step}-rank-0000{rank}" for step in (2, 3) for rank in (0, 1)]
    assert any("AdamW" in event.get("name", "") for event in json.loads(traces[0].read_text())["traceEvents"])
