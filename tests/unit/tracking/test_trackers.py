"""Trackers: what they are started with and get, how one fails, and the end. `tests/trackers` has the real packages."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.launch import run_on_ranks
from tests.support.refusals import refusal
from toolkit.checkpoint.manifest import Checkpoint
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RunConfig, SummarizationConfig, TrackingConfig
from toolkit.tracking.metrics_log import MetricsLog
from toolkit.tracking.trackers import Trackers, _name_for_mlflow, check_trackers, close_trackers, log_to_trackers, start_trackers


@pytest.fixture
def seen(monkeypatch) -> list:
    """Two trackers of the user, `first` and `second`, and what they get."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

    seen = []

    def recorder(own_name: str) -> type[GeneralTracker]:
        class Recorder(GeneralTracker):
            name, requires_logging_directory, tracker = own_name, False, SimpleNamespace(id=f"id of {own_name}")

            def __init__(self, project: str, **options) -> None:
                seen.append((own_name, project, options))

            def store_init_configuration(self, values: dict) -> None:
                seen.append((own_name, values))

            def log(self, values: dict, step: int | None = None, **_) -> None:
                if own_name == "first" and values.get("train/loss") == 13:
                    raise OSError("the disk\nis full" + "!" * 400)
                seen.append((own_name, step, values))

            def finish(self) -> None:
                raise ConnectionError

        return Recorder

    for name in ("first", "second", "trackio"):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, recorder(name))
    return seen


def config_with(folder: Path, *log_with: str) -> SummarizationConfig:
    return SummarizationConfig(
        model=ModelConfig(name_or_path="a"),
        data=DataConfig(files=["b"]),
        tracking=TrackingConfig(log_with=list(log_with), project_name="shelf"),
        run=RunConfig(name="run", output_dir=str(folder)),
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "'tensorbord' is not a tracker that accelerate knows; installed are aim, wandb"),
        ("mlflow", "'mlflow' is not installed: pip install 'shardtune[mlflow]'; installed are aim, wandb"),
        ("swanlab", "'swanlab' is not installed: pip install swanlab; installed are aim, wandb"),
    ],
)
def test_unknown_and_absent_trackers_are_refused_in_one_sentence(monkeypatch, name, sentence):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb", "aim"])
    check_trackers(TrackingConfig())
    check_trackers(TrackingConfig(log_with=["wandb"]))
    assert sentence in refusal(check_trackers, TrackingConfig(log_with=["wandb", name]))


def test_a_tracker_gets_the_config_and_the_numbers_and_one_that_fails_is_reported_once(seen, tmp_path, capsys):
    config, trackers = config_with(tmp_path, "first", "second", "first"), Trackers()
    check_trackers(config.tracking)
    start_trackers(trackers, config, tmp_path, None)
    assert [tracker.name for tracker in trackers.running] == ["first", "second"]
    log_to_trackers(trackers, "train", {"loss": 1.5, "loss_is": "fine", "rouge": None, "num_rows": 3, "flag": True}, step=7)
    started, (_, stored), *_ = seen
    assert started == ("first", "shelf", {}) and stored["optim.lr"] == config.optim.lr
    assert stored["data.files"] == '["b"]' and stored["model.revision"] == "null"
    assert seen[4:] == [(name, 7, {"train/loss": 1.5, "train/num_rows": 3}) for name in ("first", "second")]
    seen.clear()
    for step, loss in ((8, 13), (9, 1.0)):
        log_to_trackers(trackers, "train", {"loss": loss}, step)
    close_trackers(trackers)
    assert [entry[:2] for entry in seen] == [("second", 8), ("second", 9)], "the others go on"
    assert capsys.readouterr().err.splitlines() == [
        f"WARNING: first failed at step 8 (the disk is full{'!' * 284} …): it gets no more figures of this run; metrics.jsonl "
        "has all of them",
        "WARNING: second could not be closed (ConnectionError): it may lack the last figures",
    ]


def test_a_resume_sends_nothing_twice(seen, tmp_path, monkeypatch, capsys):
    """The run was killed after step 5, and goes on from its checkpoint of step 2; then again, killed after step 3."""
    config = config_with(tmp_path, "first", "trackio")
    start_trackers(Trackers(), config, tmp_path, None)
    for last in (5, 3):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
        for step in range(last + 1):
            log.write("train", step, loss=1.0)
        log.write("eval", 2, loss=1.0)
        trackers = Trackers()
        start_trackers(trackers, config, tmp_path, Checkpoint(tmp_path / "step-00000002", {"step": 2}))
        assert json.loads((tmp_path / "trackers.json").read_text()) == {
            "runs": {"trackio": "id of trackio"},
            "sent": {"train": 5, "eval": 2},
        }
        assert seen[-2] == ("trackio", "shelf", {"name": "run", "resume": "allow"})
        sentence = "steps 3 to 5 are trained again: trackio keeps their first figures, metrics.jsonl does not\n"
        assert sentence in capsys.readouterr().out
    seen.clear()
    for step in (4, 6):
        log_to_trackers(trackers, "train", {"loss": 1.0}, step)
        log_to_trackers(trackers, "eval", {"loss": 1.0}, step)
    sent = [(name, step, *values) for name, step, values in seen]
    assert [entry[1:] for entry in sent if entry[0] == "trackio"] == [(4, "eval/loss"), (6, "train/loss"), (6, "eval/loss")]
    assert len([entry for entry in sent if entry[0] == "first"]) == 4, "one whose run is not continued gets all"


def test_names_that_mlflow_refuses_are_rewritten_and_said_once(capsys):
    renamed: dict[str, str] = {}
    names = ["eval/loss/a b.c:d-é", "eval/loss/a@b", "eval/loss/a@b", "eval/loss/a#b", "eval/loss//x/../y"]
    rewritten = [_name_for_mlflow(name, renamed) for name in names]
    assert rewritten == [names[0], "eval/loss/a_40_b", "eval/loss/a_40_b", "eval/loss/a_23_b", "eval/loss/y"]
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "mlflow gets 'eval/loss/a@b' as 'eval/loss/a_40_b': it refuses other names" and len(others) == 2


def close_slowly(uploaded: str) -> bool:
    """Close a tracker that uploads on rank 0 alone; whether the upload was over when this rank went on."""
    from toolkit.distributed.comm import rank
    from toolkit.launch.accelerator import build_accelerator

    build_accelerator()

    def upload() -> None:
        time.sleep(1)
        Path(uploaded).touch()

    close_trackers(Trackers([SimpleNamespace(finish=upload)] if rank() == 0 else []))
    return Path(uploaded).exists()


def test_no_rank_leaves_before_the_trackers_are_closed(tmp_path):
    assert run_on_ranks(close_slowly, preset="ddp_cpu", args=(str(tmp_path / "uploaded"),)) == [True, True]
