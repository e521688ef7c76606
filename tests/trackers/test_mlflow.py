"""MLflow, in a local store: its client reads each figure of `metrics.jsonl` once, in one run; its limits; failures."""

import os
import sqlite3
from unittest.mock import patch

import pytest

from tests.support.launch import run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench
from tests.trackers.checks import Points, check_failure_in_mid_run, check_points, check_refused


def list_runs(bench: Workbench, project: str) -> list:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    return list(client.search_runs([client.get_experiment_by_name(project).experiment_id]))


def load(run_id: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    names = client.get_run(run_id).data.metrics
    return {name: [(point.step, point.value) for point in client.get_metric_history(run_id, name)] for name in names}


def test_every_loss_is_there_once_and_two_runs_are_two(logged):
    runs = {run.info.run_name: run for run in list_runs(logged, "shelf")}
    assert runs.keys() == {"one", "killed"} and len(list_runs(logged, "shelf")) == 2
    for name, run in runs.items():
        check_points(logged, name, load(run.info.run_id))
        assert run.info.status == "FINISHED"
        assert run.data.params["train.max_steps"] == "4", "MLflow keeps those of the first start"


def test_long_values_are_cut_and_a_line_says_so(bench):
    printed = bench.run(
        "limits",
        tracking__log_with=["mlflow"],
        tracking__project_name="limits",
        data__prefix="y" * 6001,
        data__max_source_length_tokens=8,
        eval__generate=False,
    )
    assert "mlflow gets data.prefix cut to 6,000 characters, which is mlflow's limit" in printed
    (run,) = list_runs(bench, "limits")
    assert run.data.params["data.prefix"] == "y" * 5998 + " …"


def fail_and_begin_again(argv: list[str]) -> None:
    """In one process, as in a notebook."""
    from toolkit.training import loop

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with patch.object(loop, "call_after_step", fail), pytest.raises(ZeroDivisionError):
        run_in_this_process("t5", argv)
    run_in_this_process("t5", argv)


def test_a_run_after_one_that_failed_in_the_same_process_has_its_own(bench):
    flags = bench.flags("again", tracking__log_with=["mlflow"], tracking__project_name="again", eval__generate=False)
    run_on_ranks(fail_and_begin_again, preset="single", overrides=FP32, args=(flags,))
    second, first = list_runs(bench, "again")
    assert [step for step, _ in load(first.info.run_id)["train/loss"]] == [1]
    check_points(bench, "again", load(second.info.run_id))


def drop_the_table() -> None:
    with sqlite3.connect(os.environ["MLFLOW_TRACKING_URI"].removeprefix("sqlite:///")) as store:
        store.execute("DROP TABLE metrics")


def test_a_failure_in_mid_run_is_one_warning(bench):
    with patch.dict(os.environ, {"MLFLOW_TRACKING_URI": f"sqlite:///{bench.runs / 'other.db'}"}):
        warning = check_failure_in_mid_run(bench, "mlflow", drop_the_table)
    assert warning.startswith("mlflow failed at step 2 (") and "no such table: metrics" in warning


def test_a_server_that_does_not_answer_is_one_sentence_on_all_ranks(bench):
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with patch.dict(os.environ, nobody):
        why = check_refused(bench, "mlflow")
    assert "127.0.0.1" in why and "): see that the store of MLFLOW_TRACKING_URI answers, or " in why
