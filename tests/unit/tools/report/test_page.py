"""`report.html`, read back as a browser would parse it; its texts stand beside their own row's source, reference and scores."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.support.model_folders import save_jsonl
from tests.support.pages import Page
from tests.support.refusals import refusal
from tests.support.report_runs import HOSTILE, evaluation, save_long_run, save_run, save_whole_run, train
from toolkit.data.collate import CausalCollator
from toolkit.errors import escape_controls
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.objectives.causal import Causal
from toolkit.parallel.units import describe_units
from toolkit.tools.preview.summary import _sources
from toolkit.tools.report import facts
from toolkit.tools.report import page as page_module
from toolkit.tools.report.charts import NUM_BUCKETS
from toolkit.tools.report.facts import MOST_PREDICTIONS, read_runs
from toolkit.tools.report.page import collect_predictions, save_page, save_run_page

SECTIONS = ["Summary", "Curves", "Predictions", "Data", "Checkpoints", "Memory", "Shard units", "Config", "Versions and commands"]


def write(tmp_path: Path, *folders: Path) -> Page:
    save_page(folders, tmp_path / "page.html")
    return Page(tmp_path / "page.html")


def test_a_run_is_shown_whole_and_without_a_request(tmp_path):
    page = write(tmp_path, save_whole_run(tmp_path / "run"))

    # All sections, with a table and a name for each chart.
    assert page.texts["h2"] == SECTIONS
    titles = ["Loss", "ROUGE-L", "Learning rate", "Gradient norm", "Speed", "Step time", "Peak memory"]
    assert page.texts["h3"] == [*titles, "Rows", "Lengths", "Tokenizer"]
    assert [text for text in page.texts["summary"] if text.endswith("as a table")] == [f"{title} as a table" for title in titles]
    names = [attributes["aria-label"] or "" for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert re.search(r"training: from [\d.]+ at step 1 to [\d.]+ at step 2", names[0])
    assert len(names) == len(titles) == len(page.data("charts"))
    # Baselines, marks, memory beside its plan, units, versions and commands.
    shown = ("lead sentence", "17.00", "skipped update", "resume", "rank 1", "planned", "3.00", "T5Block", "50.0%")
    assert [words for words in (*shown, "2.13", "median 7", "1,234") if words not in page.words] == []
    assert "accelerate launch recipes/t5.py" in page.texts["pre"] and "lr" in page.words
    # Texts are those of the files; half a surrogate pair too.
    predictions = page.data("predictions")
    assert predictions["columns"] == ["before training", "after step 2"] and predictions["metrics"] == ["rougeL"]
    assert [row["texts"] for row in predictions["rows"]] == [["a", "c"], ["b", HOSTILE]]
    assert [row["source"] for row in predictions["rows"]] == ["source 0", HOSTILE]
    assert [[scores["rougeL"] for scores in row["scores"]] for row in predictions["rows"]] == [[0, 20], [10, 10]]
    # Two scripts run, which the policy names; nothing is requested.
    run_scripts = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    assert len(run_scripts) == 2 and not any(attributes.get("src") for attributes, _ in page.scripts)
    policy = next(a["content"] or "" for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and policy.count("'sha256-") == 2 and "http" not in policy
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "onerror", "onclick", "onload"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert not re.search(r"url\(|@import", "".join(page.texts["style"]))


def test_names_and_settings_stay_text(tmp_path):
    lines = [evaluation(0, loss=3.0), {**evaluation(1, loss=2.0), "<b>own</b>": 1.0}]
    run = save_run(tmp_path / "<script>alert(2)<", *lines)
    (run / "config.yaml").write_text(json.dumps({"data": {"files": HOSTILE}}))
    page = write(tmp_path, run)
    assert len(page.scripts) == 4 and not any(tag in ("img", "b") for tag, _ in page.tags)
    assert page.texts["h1"] == ["<script>alert(2)<"] and escape_controls(HOSTILE).replace("\ud800", "?") in page.texts["td"]
    # Beside another one, names are in each legend and in the description of each chart.
    page = write(tmp_path, run, save_run(tmp_path / '" onload="<b>', *lines))
    assert page.data("charts"), "a name that opens a script hides the data behind it"
    assert len(page.scripts) == 4 and not any(tag in ("img", "b") or "onload" in attributes for tag, attributes in page.tags)


def test_several_runs_with_the_keys_that_differ(tmp_path):
    lines = [evaluation(0, loss=3.0), train(1), evaluation(1, loss=2.0, rougeL=9.0)]
    one, two = (save_run(tmp_path / name, *lines, lr=lr) for name, lr in (("one", 0.1), ("two", 0.2)))
    page = write(tmp_path, one, two)
    cells = page.texts["td"]
    place = cells.index("optim.lr")
    assert cells[place : place + 3] == ["optim.lr", "0.1", "0.2"]
    assert [cells.count(f"optim.{name}") for name in ("lr", "beta1")] == [3, 2], "each run's whole config, and the one difference"
    assert {"one: training", "two: training", "one: evaluation"} <= set(page.texts["span"])
    # Runs of one name are shown with their paths, and one that is given twice is shown once.
    other = save_run(tmp_path / "other" / "one", train(1), evaluation(1, loss=4.5))
    page = write(tmp_path, one, other, one)
    assert page.texts["h1"] == [f"{one} · {other}"] and {"2.00", "4.50"} <= set(page.texts["td"])


def test_10_000_steps_and_1_000_rows_are_5_mb_and_no_spike_is_lost(tmp_path):
    page = write(tmp_path, save_long_run(tmp_path / "run"))
    assert (tmp_path / "page.html").stat().st_size <= 5_000_000
    assert "1000" in json.dumps(page.data("charts")["chart-0"]) and f"each of {NUM_BUCKETS} ranges of steps" in page.words
    predictions = page.data("predictions")
    assert len(predictions["rows"]) == 1000 and predictions["num_cut"] == 1000
    assert f"Texts longer than {predictions['limit']:,} characters are cut (in 1,000 of 1,000 rows)" in page.words


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "memory.json", "record.json"])
def test_what_is_missing_or_broken_is_a_sentence(tmp_path, name):
    run = save_run(tmp_path / "run", train(1), {"kind": "train", "step": 2, "loss": None, "loss_is": "nan"})
    (run / "memory.json").unlink(missing_ok=True)
    (run / name).unlink(missing_ok=True)
    page = write(tmp_path, run)
    assert page.texts["h2"] == SECTIONS and f"{name} is not in the folder: " in page.words
    (run / name).write_text('{"a": [\n{')
    assert f"{name} cannot be read (" in write(tmp_path, run).words


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("record.json", lambda record: record["units"][0].pop("count")),
        ("record.json", lambda record: record.update(num_processes="two", sources=None)),
        ("memory.json", lambda memory: memory.pop("device")),
    ],
    ids=["units", "processes", "memory"],
)
def test_a_file_that_lacks_something_costs_one_section_of_its_run(tmp_path, file, change):
    run, other = save_whole_run(tmp_path / "run"), save_whole_run(tmp_path / "other")
    content = json.loads((run / file).read_text())
    change(content)
    (run / file).write_text(json.dumps(content))
    sentence = "This cannot be shown of run, as one of its files is not what a run writes ("
    assert write(tmp_path, run).words.count(sentence) == 1
    both = write(tmp_path, other, run)
    assert both.words.count(sentence) == 1 and both.texts["h2"] == SECTIONS


def test_a_run_that_is_still_training_is_shown(tmp_path):
    run = save_run(tmp_path / "run", evaluation(0, loss=3.0), train(1), train(2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000003.tmp").mkdir()
    page = write(tmp_path, run)
    assert "2 steps." in page.words and "training: from 2 at step 1 to 2 at step 2" in str(page.tags)
    assert "not valid: has no manifest.json: it was never finished" in page.texts["td"]


def test_a_page_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    run = save_run(tmp_path / "run", train(1))
    save_run_page(run)
    before = (run / "report.html").read_bytes()
    monkeypatch.setattr(page_module, "render_page", lambda runs: 1 / 0)
    save_run_page(run)
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "was not written (division by zero)" in message and message.endswith(f"python -m toolkit report {run}")
    assert (run / "report.html").read_bytes() == before
    monkeypatch.undo()
    assert "is not a run folder" in refusal(save_page, [tmp_path], tmp_path / "page.html")
    assert "could not be written" in refusal(save_page, [run], tmp_path / "gone" / "page.html")


def save_texts(folder: Path, first_reference: str, sources: dict[str, str], **texts: list[str]) -> Path:
    """A run that predicts rows 7 and 8 in every second step; other rows at first."""
    lines = [evaluation(step, rougeL=step) for step in (2, 4, 6)]
    run = save_run(folder, evaluation(0, rougeL=0.0, measured_on={"rows": "b"}), *lines)
    for step, predicted in ((0, ["old", "old"]), (2, texts["first"]), (4, ["no", "no"]), (6, texts["last"])):
        rows = [
            {"row_id": 7 + place, "reference": reference, "prediction": predicted[place], "rougeL": 10 * step + place}
            for place, reference in enumerate((first_reference, "both"))
        ]
        save_jsonl(run / f"predictions-{step}.jsonl", rows)
    (run / "record.json").write_text(json.dumps({"sources": sources}))
    return run


def test_texts_are_the_first_and_the_last_of_a_run_and_of_several_the_last_of_each_with_its_own_sources(tmp_path, monkeypatch):
    """Runs on other data number other rows: an id says nothing about another run's row."""
    one = save_texts(tmp_path / "one", "ref", {"7": "source 7"}, first=["a", "b"], last=["c", "d"])
    two = save_texts(tmp_path / "two", "other", {"7": "their 7", "8": "source 8"}, first=["e", "f"], last=["g", "h"])

    def collected(*runs: Path) -> tuple[list[str], list[list]]:
        found = collect_predictions(read_runs(runs))
        names = ("id", "reference", "source", "texts", "scores")
        return found["columns"], [[row[name] for name in names] for row in found["rows"]]

    assert collected(one) == (
        ["after step 2", "after step 6"],
        [
            ["7", "ref", "source 7", ["a", "c"], [{"rougeL": 20}, {"rougeL": 60}]],
            ["8", "both", None, ["b", "d"], [{"rougeL": 21}, {"rougeL": 61}]],
        ],
    )
    assert collected(one, two) == (
        ["one: after step 6", "two: after step 6"],
        [
            ["7", "ref", "source 7", ["c", None], [{"rougeL": 60}, {}]],
            ["8", "both", "source 8", ["d", "h"], [{"rougeL": 61}, {"rougeL": 61}]],
            ["7", "other", "their 7", [None, "g"], [{}, {"rougeL": 60}]],
        ],
    )
    monkeypatch.setattr(facts, "MOST_PREDICTIONS", 1)
    assert [row[0] for row in collected(one)[1]] == ["7"]


def test_a_text_that_is_cut_is_counted(tmp_path):
    sources = {"7": "s" * facts.LONGEST_TEXT, "8": "s" * (facts.LONGEST_TEXT + 1)}
    run = save_texts(tmp_path / "run", "ref", sources, first=["a", "b"], last=["c", "d" * (facts.LONGEST_TEXT + 1)])
    found = collect_predictions(read_runs([run]))
    assert found["num_cut"] == 1 and len(found["rows"][1]["texts"][1]) == facts.LONGEST_TEXT
    whole, cut = (row["source"] for row in found["rows"])
    assert whole == sources["7"] and cut == f"{'s' * (facts.LONGEST_TEXT - 1)}…" and found["rows"][1]["texts"][1].endswith("d…")


def test_equal_units_share_a_line_with_the_bytes_of_all():
    def unit(class_name: str, name: str, num_trainable: int, num_bytes: int):
        same = {"num_parameters": 10, "dtypes": ("float32",), "local_bytes": lambda: num_bytes, "cut": lambda: ""}
        return SimpleNamespace(class_name=class_name, name=name, num_trainable=num_trainable, **same)

    units = [unit("Block", "0", 0, 4), unit("Block", "1", 10, 5), unit("Block", "2", 10, 6), unit("Model", "", 10, 7)]
    names = ("unit", "count", "num_trainable", "bytes_on_rank_0")
    assert [tuple(line[name] for name in names) for line in describe_units(units)] == [
        ("Block 0", 1, 0, 4),
        ("Block", 2, 10, 11),
        ("Model (the rest)", 1, 10, 7),
    ]


def test_sources_are_kept_of_the_rows_with_a_prompt_and_predictions_at_even_distances():
    columns = {"row_id": [5, 6, 7, 8], "prompt_length": [0, 3, 0, 5], "lead_text": ["a", "b", "c", "d"]}
    tokenizer = None
    assert _sources(EvaluationRows(Dataset.from_dict(columns), tokenizer, CausalCollator(0), Causal())) == {"6": "b", "8": "d"}
    assert even_places(3, MOST_PREDICTIONS) == [0, 1, 2]
    places = even_places(5 * MOST_PREDICTIONS // 2, MOST_PREDICTIONS)
    assert len(places) == MOST_PREDICTIONS and places[:3] == [0, 2, 5] and places[-1] == 5 * MOST_PREDICTIONS // 2 - 3
