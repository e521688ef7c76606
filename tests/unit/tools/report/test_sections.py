"""Tables, bars and sentences of a page have the figures that they name."""

import re
import shutil
from dataclasses import replace

import pytest

from tests.support.report_runs import save_distinct_run
from toolkit.tools.report.facts import RunFacts, read_runs
from toolkit.tools.report.sections import Section, describe_checkpoints, describe_commands, describe_summary, load_template


@pytest.fixture
def run(tmp_path) -> RunFacts:
    return read_runs([save_distinct_run(tmp_path / "run")])[0]


def shown(section: Section, run: RunFacts) -> str:
    return str(load_template().flow(section([run])))


def cells(page: str) -> list[str]:
    return re.findall("<td.*?>(.*?)</td>", page)


def test_the_best_is_the_first_evaluation_with_the_last_checkpoints_best_value(run):
    assert run.best_evaluation() == ("rougeL", 30.0, 4)
    run.checkpoints[1] = replace(run.checkpoints[1], num_bytes=3 * 2**20)
    assert cells(shown(describe_checkpoints, run)) == [
        *("step-00000002", "0.0", "1", "20.0000", "complete"),
        *("step-00000004", "3.0", "1", "30.0000", "complete, the best"),
        *("step-00000006", "0.0", "1", "29.0000", "complete"),
    ]


def test_where_a_run_stands(run):
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
    assert (
        "After step 6, of 3 texts, 2 reached max_new_tokens (raise eval.max_new_tokens), 1 ended in a repetition "
        "(eval.no_repeat_ngram_size 3 forbids it)."
    ) in page
    assert "num" not in "".join(re.findall("<th.*?>(.*?)</th>", page)), "a count has no column"


def test_the_best_checkpoint_is_offered_for_export_or_the_last_one_kept(run):
    assert f"export {run.folder} --checkpoint 4" in shown(describe_commands, run)
    shutil.rmtree(run.folder / "checkpoints" / "step-00000004")
    [run] = read_runs([run.folder])
    assert f"export {run.folder} --checkpoint 6" in shown(describe_commands, run)
    assert "after step 4, whose checkpoint is not kept" in shown(describe_summary, run)
