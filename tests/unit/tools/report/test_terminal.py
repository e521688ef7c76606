"""Tables, bars and sentences of a page have the figures that they name. The end of a run in the terminal; several runs: their
evaluations in one table, and their memory beside its plan."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.report_runs import evaluation, save_distinct_run, save_run
from tests.support.tiny_models import causal_config
from toolkit.evaluation.generate import describe_flaws
from toolkit.objectives.causal import Causal
from toolkit.tools.main import main
from toolkit.tools.plan import plan
from toolkit.tools.report.facts import RunFacts, read_runs
from toolkit.tools.report.sections import Section, describe_checkpoints, describe_commands, describe_summary, load_template
from toolkit.tools.report.terminal import _print_samples, show_runs
from toolkit.tracking import metrics_log as step_memory
from toolkit.tracking.metrics_log import MetricsLog, StepMemory, save_memory


@pytest.fixture
def run(tmp_path) -> RunFacts:
    return read_runs([save_distinct_run(tmp_path / "run")])[0]


def shown(section: Section, run: RunFacts) -> str:
    return str(load_template().flow(section([run])))


def cells(page: str) -> list[str]:
    return re.findall("<td.*?>(.*?)</td>", page)


def test_where_a_run_stands_and_its_best_is_the_first_evaluation_with_the_last_checkpoints_best_value(run):
    assert run.best_evaluation() == ("rougeL", 30.0, 4)
    run.checkpoints[1] = replace(run.checkpoints[1], num_bytes=3 * 2**20)
    assert cells(shown(describe_checkpoints, run)) == [
        *("step-00000002", "0.0", "1", "20.0000", "complete"),
        *("step-00000004", "3.0", "1", "30.0000", "complete, the best"),
        *("step-00000006", "0.0", "1", "29.0000", "complete"),
    ]
    page = shown(describe_summary, run)
    assert (
        "6 steps of 8 on 2 processes; the best rougeL is 30, after step 4, whose checkpoint is kept; 1 evaluation is not shown: "
        "measured on other rows or with other settings."
    ) in page
    assert cells(page) == [
        *("of rows a", "–", "17.00", "44.00"),
        *("after step 2", "3.00", "20.00", "41.00"),
        *("after step 6", "2.75", "30.00", "43.00"),
    ]
    # The best checkpoint is offered for export, or else the last one kept.
    assert f"export {run.folder} --checkpoint 4" in shown(describe_commands, run)
    shutil.rmtree(run.folder / "checkpoints" / "step-00000004")
    [run] = read_runs([run.folder])
    assert f"export {run.folder} --checkpoint 6" in shown(describe_commands, run)
    assert "after step 4, whose checkpoint is not kept" in shown(describe_summary, run)


def test_the_summary_has_tokens_duration_and_date_and_what_is_wrong_with_the_texts(run, tmp_path):
    assert "training steps" not in shown(describe_summary, run), "its lines have no tokens, as those of older runs"
    for step, line in enumerate([line for line in run.lines if line["kind"] == "train"], start=1):
        line |= {"num_tokens": 1000 * step, "num_rows": 10, "step_time_s": 60.5}
    page = shown(describe_summary, run)
    assert "21,000 tokens in 6 min 03 s of training steps." in page and "started" not in page and "texts" not in page
    run.record["started"] = "2026-11-23 18:30"
    run.evaluations[0].update(num_texts=3, num_empty=3)  # not the last one
    run.evaluations[-1].update(num_texts=3, num_at_max_new_tokens=2, num_empty=0, num_repeating=1)
    page = shown(describe_summary, run)
    assert "21,000 tokens in 6 min 03 s of training steps, started 2026-11-23 18:30." in page and "empty" not in page
    assert f"After step 6, {describe_flaws(run.evaluations[-1])}." in page and "of 3 texts, 2 reached max_new_tokens" in page
    assert "num" not in "".join(re.findall("<th.*?>(.*?)</th>", page)), "a count has no column"


PRESET = Path(__file__).parents[4] / "accelerate_configs" / "fsdp2_cpu.yaml"
CONFIG = """
model: {name_or_path: MODEL, from_scratch: true}
data: {source: not/read, max_length_tokens: 128}
train: {global_batch_size_rows: 8, micro_batch_size_rows: 4, max_steps: 1}
"""


def printed(capsys: pytest.CaptureFixture[str], *runs: Path) -> tuple[str, list[list[str]], str]:
    """What is printed: before the table, its cells, and the memory."""
    show_runs(runs)
    before, *tables, memory = capsys.readouterr().out.split("\n\n")
    return before, [line.split() for table in tables for line in table.splitlines()], memory


def test_first_and_last_evaluation_of_each_run_in_one_table(tmp_path, capsys):
    base = save_run(
        tmp_path / "base", evaluation(0, loss=9.0), {"kind": "train", "step": 1}, evaluation(5, loss=8.0), evaluation(9, loss=7.0)
    )
    rambling = ["reference 0\n\n    And more", " reference 1\nMore"]
    tuned = save_run(tmp_path / "tuned", evaluation(0, loss=3.25, rougeL=50.0), predictions={0: rambling})
    before, table, _ = printed(capsys, base, tuned)
    assert "base: 9 steps." in before.splitlines()
    assert table == [
        ["loss", "rougeL", "rougeL", "line1"],
        ["base,", "before", "training", "9.00", "–", "–"],
        ["base,", "after", "step", "9", "7.00", "–", "–"],
        ["tuned,", "before", "training", "3.25", "50.00", "100.00"],
    ]


@pytest.mark.parametrize("prediction", [{"reference": "Return the oar."}, "Return the oar.", {"prediction": 3, "reference": ""}])
def test_predictions_that_no_run_writes_are_one_sentence(tmp_path, capsys, prediction):
    run, other = (save_run(tmp_path / name, evaluation(0, loss=1.0)) for name in ("run", "other"))
    (run / "predictions-0.jsonl").write_text(json.dumps(prediction) + "\n")
    said, table, _ = printed(capsys, run, other)
    assert "This cannot be shown of run, as one of its files is not what a run writes (" in said
    assert table[-1] == ["other,", "before", "training", "1.00"]


def test_a_name_that_would_turn_the_line_around_is_escaped_and_keeps_the_columns(tmp_path, capsys, monkeypatch):
    runs = [str(save_run(tmp_path / name, evaluation(0, loss=9.0))) for name in ("a\u202eb", "other\nline")]
    for arguments in (["--text", *runs], runs[:1]):
        monkeypatch.setattr("sys.argv", ["toolkit", "report", *arguments])
        main()
    out = capsys.readouterr().out
    header, *rows = out.split("\n\n")[1].splitlines()
    assert out.endswith("a\\u202eb: open it in a browser\n")
    assert [len(row) for row in rows] == [len(header)] * 2 and "\u202e" not in out
    assert [row.partition(",")[0] for row in rows] == ["a\\u202eb", "other\\nline"]


def test_runs_of_other_rows_have_a_table_of_their_own(tmp_path, capsys):
    measured = {"one": "a", "two": "b\nrows", "three": "a"}
    runs = (save_run(tmp_path / name, evaluation(0, loss=2.0, measured_on={"rows": of})) for name, of in measured.items())
    before, table, _ = printed(capsys, *runs)
    assert [row[0] for row in table] == ["loss", "one,", "three,", "loss", "two,"]
    assert before.splitlines()[-1].startswith("The figures of one, three and of two were measured on other rows")


def test_a_young_run_is_shown(tmp_path, capsys):
    before, table, memory = printed(capsys, save_run(tmp_path / "young", {"kind": "train", "step": 1}))
    assert before.splitlines() == ["1 steps.", "There is no evaluation."] and not table
    assert "memory.json is not in the folder" in memory
    (tmp_path / "without" / "checkpoints" / "step-00000002").mkdir(parents=True)
    without = printed(capsys, tmp_path / "without")[0]
    assert without.startswith("metrics.jsonl is not in the folder: there are no curves and no evaluations")


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A run of one process that has saved what it took."""
    causal_config("llama", max_position_embeddings=128).save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    monkeypatch.setattr(step_memory, "find_accelerate_yaml", lambda: PRESET)
    memory = StepMemory(torch.device("cpu"))
    memory.record_batch(Causal(), {"input_ids": torch.zeros(1, 4 * 96)}, 4)  # packs in one row, longer than the model's positions
    memory.read()
    save_memory(tmp_path, memory, MetricsLog(tmp_path / "metrics.jsonl", is_writer=True))
    return tmp_path


def change(folder: Path, **figures) -> None:
    found = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps(found | figures))


def test_the_plan_of_a_run_stands_beside_its_memory(run_folder, capsys):
    change(run_folder, num_processes=2, peak_gib=[1.5, 1.25])
    said = printed(capsys, run_folder)[2].splitlines()
    assert said == ["What a process on a CPU holds is mostly libraries, and is not shown."]
    assert not (run_folder / "memory_plan.json").exists()
    change(run_folder, device="cuda", peak_gib=[0.5, 0.25])
    assert "The plan differs by -99 % from the rank with most." in printed(capsys, run_folder)[2]
    kept = json.loads((run_folder / "memory_plan.json").read_text())
    assert kept["device_bytes_total"] > 0
    change(run_folder, device="cuda", num_processes=2, peak_gib=[1.0, 2.0])
    (run_folder / "memory_plan.json").write_text(json.dumps(kept | {"device_bytes_total": 3 * 2**30}))
    assert printed(capsys, run_folder)[2].splitlines() == [
        "GiB of training steps by rank, allocated on the GPU.",
        *("rank 0   1.00", "rank 1   2.00", "planned  3.00"),
        "The plan differs by +50 % from the rank with most.",
    ]


def test_a_run_is_planned_for_its_own_gpu_and_launch(run_folder, monkeypatch):
    planned = MagicMock(return_value=MagicMock(total=2**30))
    monkeypatch.setattr(plan, "build_plan", planned)
    for gpu_gib in (23.6, None):
        (run_folder / "memory_plan.json").unlink(missing_ok=True)
        change(run_folder, device="cuda", num_processes=2, gpu_gib=gpu_gib, micro_batch_size_rows=3)
        show_runs([run_folder])
    assert [call.args[-1] for call in planned.call_args_list] == [23.6, 80.0]
    # For its processes and its largest micro-batch; again if these change.
    _, _, num_processes, arguments, *_ = planned.call_args.args
    assert num_processes == 2 and arguments[1:] == ["--data.max_length_tokens=96", "--train.micro_batch_size_rows=3"]
    for name, value in (("num_processes", 1), ("micro_batch_size_rows", 2), ("row_tokens", {"row": 64})):
        planned.reset_mock()
        change(run_folder, **{name: value})
        show_runs([run_folder])
        show_runs([run_folder])
        assert planned.call_count == 1, name


def test_why_there_is_no_plan_is_reported(run_folder, capsys):
    change(run_folder, device="cuda")
    (run_folder / "model" / "config.json").unlink()
    assert "There is no memory plan: model.name_or_path" in printed(capsys, run_folder)[2]
    (run_folder / "accelerate.yaml").unlink()
    why = "There is no memory plan: the run was launched without an accelerate YAML"
    assert printed(capsys, run_folder)[2].splitlines()[-1] == why


@pytest.mark.parametrize("content", [None, "", '{"reference": "a", "predi', {"reference": "b\x07", "prediction": "c\x07\nd"}])
def test_samples_are_printed_without_control_characters_or_are_gone_or_changed(tmp_path, capsys, content):
    from datasets import Dataset

    path = tmp_path / "predictions-1.jsonl"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    _print_samples(path, Dataset.from_dict({"lead_text": ["a\x1b]0;owned"]}))
    sample = "  text:      a\\x1b]0;owned\n  reference: b\\x07\n  generated: c\\x07\nd\n\n" * 3
    gone = f"no samples: {path} is missing, or is not what the evaluation wrote\n\n"
    assert capsys.readouterr().out == (sample if isinstance(content, dict) else gone)
