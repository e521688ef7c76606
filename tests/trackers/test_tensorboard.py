"""TensorBoard: a run folder is one run, with the figures of `metrics.jsonl`; a resume goes on in the same curve."""

from pathlib import Path

import pytest

from tests.trackers.checks import Points, check_failure_in_mid_run, check_points, check_refused

EventAccumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator


def load(folder: Path) -> tuple[Points, EventAccumulator]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, events


def test_every_loss_is_there_once_and_each_run_is_one_run(logged):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer().AddRunsFromDirectory(str(logged.runs)).Runs()
    assert sorted(found) == ["killed/tensorboard", "one/tensorboard"]
    for name, num_steps in (("one", 4), ("killed", 5)):
        points, _ = load(logged.runs / name / "tensorboard")
        assert len(points["train/loss"]) == num_steps
        check_points(logged, name, points)


def test_the_config_is_in_the_same_events(logged):
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    _, events = load(logged.runs / "killed" / "tensorboard")
    (text,) = events.Tensors("config/text_summary")[-1].tensor_proto.string_val
    assert b"\n    train.max_steps: 5\n" in text and b'    tracking.log_with: ["tensorboard"]' in text
    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["optim.schedule"].string_value == "constant"
    assert start.hparams["train.max_steps"].number_value == 4, "TensorBoard takes those of the first start"


def break_the_writer() -> None:
    from torch.utils.tensorboard import SummaryWriter

    def add_scalar(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    SummaryWriter.add_scalar = add_scalar


def test_a_failure_in_mid_run_is_one_warning(bench):
    assert check_failure_in_mid_run(bench, "tensorboard", break_the_writer) == (
        "tensorboard failed at step 2 ([Errno 28] No space left on device): it gets no more figures of this run; metrics.jsonl "
        "has all of them"
    )
    points, _ = load(bench.runs / "broken" / "tensorboard")
    assert [step for step, _ in points["train/loss"]] == [1, 2] and "eval/loss" not in points


def test_a_folder_that_cannot_be_written_is_one_sentence_on_all_ranks(bench):
    (bench.runs / "refused").mkdir()
    (bench.runs / "refused" / "tensorboard").touch()
    assert "): fix that, or " in check_refused(bench, "tensorboard")
