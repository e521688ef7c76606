"""What a resume takes over, and disks that refuse."""

import json
from dataclasses import asdict, astuple, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from torch import nn

from tests.support.checkpoint_files import LOSS, make_checkpoint
from tests.support.refusals import refusal
from toolkit import __version__
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint.find import best_value
from toolkit.checkpoint.load import best_of_run, check_identity, check_settings, describe_versions, forget_unequal
from toolkit.checkpoint.manifest import Checkpoint
from toolkit.checkpoint.state import Identity, SkipHistory, TrainState, model_tensors
from toolkit.config.schema import LLMConfig
from toolkit.errors import UserError
from toolkit.launch.rank_consistency import installed_versions

SETTINGS = {"optim.lr": 1e-3, "eval.best_metric": "loss", "mixed_precision": "bf16"}
OTHER = {"rows": "b", "num_beams": 1}
OURS = Identity(SETTINGS, "m", data_fingerprint="d", frozen_hashes={"a": "1", "b": "2"})


def saved(settings: dict = SETTINGS) -> Checkpoint:
    identity = asdict(replace(OURS, config=settings))
    manifest = {"step": 3, "metrics": {}, "state": TrainState(3).in_manifest(), "identity": identity}
    return Checkpoint(Path("step-00000003"), manifest)


def mix(weight: float = 2.0, files: str = "a.jsonl", **more) -> dict:
    return {"data.mix": [{"source": "jsonl", "weight": weight, "files": files, **more}]}


@pytest.mark.parametrize(
    ("theirs", "ours", "reason", "keeps_metrics"),
    [
        ({}, {}, None, True),
        ({"num_beams": 4}, {}, None, False),
        ({"rows": "b"}, {}, "other rows are evaluated", False),
        ({"num_beams": 4}, {"compared": ("rows", "num_beams")}, "eval.num_beams is 1 now", False),
        ({}, {"name": "rougeL"}, "eval.best_metric is rougeL now", True),
    ],
)
def test_the_best_value_is_forgotten_where_figures_would_not_be_equals(theirs, ours, reason, keeps_metrics):
    manifest = {"identity": {"config": SETTINGS}, "measured_on": LOSS.measured_on | theirs}
    state = TrainState(7, best_value=0.5, num_evaluations_without_gain=2, start_value=0.9, metrics={"loss": 0.6})
    sentence = forget_unequal(state, manifest, replace(LOSS, **ours))
    metrics = {"loss": 0.6} if keeps_metrics else {}
    if reason is None:
        assert sentence is None and state == TrainState(7, 0.5, 2, 0.9, metrics=metrics)
    else:
        assert sentence == f"the best loss so far, 0.5, is not compared with later values: {reason}"
        assert state == TrainState(7, metrics=metrics)


@pytest.mark.parametrize(
    ("theirs", "ours", "sentence"),
    [
        ({}, {}, None),
        (
            {},
            {"mixed_precision": "no"},
            "mixed_precision is 'no', but step-00000003 was made with 'bf16': set it back in the acc",
        ),
        # A key that is newer than the checkpoint may not change the run.
        ({}, {"optim.skip_beyond_sigmas": None}, None),
        ({}, {"optim.skip_beyond_sigmas": 4.0}, "optim.skip_beyond_sigmas is 4.0, but step-00000003 was made with None"),
        ({}, {"optim.warmup_ratio": 0.0}, None),
        ({}, {"optim.warmup_ratio": 4.0}, "optim.warmup_ratio is 4.0, but step-00000003 was made with None"),
        # Older checkpoints are of adamw.
        ({}, {"optim.name": "adamw"}, None),
        ({}, {"optim.name": "lion"}, "optim.name is 'lion', but step-00000003 was made with 'adamw': set it back to resume"),
        ({}, {"model.trained_dtype": "float32"}, None),
        ({"optim.name": "lion"}, {"optim.name": "adamw"}, "optim.name is 'adamw', but step-00000003 was made with 'lion'"),
        # A kind of file may follow from its ending, and the files of a mix may move.
        ({"data.source": "csv"}, {"data.source": ""}, None),
        ({"data.source": "csv"}, {"data.source": None}, None),
        ({"data.source": ""}, {"data.source": "parquet"}, None),
        ({"data.source": "csv"}, {"data.source": "me/rows"}, "data.source is 'me/rows', but step-00000003 was made with 'csv'"),
        ({"data.mix": [{"source": "csv"}]}, {"data.mix": [{"source": ""}]}, None),
        (mix(), mix(files="elsewhere/a.jsonl"), None),
        (mix(), mix(name="news", hub_subset=None, hub_eval_split=None), None),  # of a version that had fewer keys
        (mix(), mix(weight=1.0), "data.mix is "),
        ({"adapter.base_dtype": "nf4"}, {"adapter.base_dtype": "int8"}, "adapter.base_dtype is 'int8', but step-"),
        ({"model.add_tokens": ["a", "b"]}, {"model.add_tokens": ["a"]}, "model.add_tokens is ['a'], but step-"),
    ],
)
def test_settings_that_change_a_run_are_refused(theirs, ours, sentence):
    if sentence is None:
        check_settings(saved(SETTINGS | theirs), SETTINGS | theirs | ours, LLMConfig)
    else:
        assert refusal(check_settings, saved(SETTINGS | theirs), SETTINGS | theirs | ours, LLMConfig).startswith(sentence)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"model_config_hash": "n"}, ["the model's config.json is not the one step-00000003 was trained with: set it back"]),
        # Also those of the same rows, where another version of the toolkit makes them or trains their tokenizer again.
        ({"data_fingerprint": "e"}, ["the data is not what step-00000003 ", "version makes", "tokenizer, for model.tokenizer"]),
        ({"frozen_hashes": {"a": "1", "b": "3"}}, ["1 differ, b first"]),
    ],
)
def test_another_model_other_tokens_and_another_base_are_refused(ours, words):
    assert check_identity(saved(), OURS) == TrainState(3)
    sentence = refusal(check_identity, saved(), replace(OURS, **ours))
    assert all(word in sentence for word in words)


def test_a_resume_under_other_versions_names_them():
    now = version("torch")
    assert describe_versions({"versions": installed_versions()}) is None and describe_versions({}) is None
    assert describe_versions({"versions": {"toolkit": __version__, "torch": "2.0", "peft": "0.1"}}) == (
        f"the checkpoint was made with torch 2.0 ({now} now), peft 0.1 ({version('peft')} now): later losses may differ a little"
    )


def test_the_best_saved_is_of_these_rows_and_of_steps_done(tmp_path):
    """Without one every figure is the best: a run whose earlier best was never kept must keep the next."""
    assert best_value(tmp_path, LOSS, 9) is None
    make_checkpoint(tmp_path, 1, 0.1, OTHER)
    assert best_value(tmp_path, LOSS, 9) is None
    make_checkpoint(tmp_path, 2, 0.6)
    make_checkpoint(tmp_path, 12, 0.5)
    assert best_value(tmp_path, LOSS, 9) == 0.6


def test_the_choice_of_the_best_names_what_was_not_compared(tmp_path):
    # Somebody has removed all of them since the last save; the training must not be lost for that.
    none = f"{tmp_path} has no checkpoint any more to take the best from: exporting the last weights"
    assert best_of_run(tmp_path, LOSS) == (None, none)
    make_checkpoint(tmp_path, 1, 0.1, OTHER)
    chosen = make_checkpoint(tmp_path, 2, 0.25)
    make_checkpoint(tmp_path, 3, 0.5)
    sentence = "exporting the weights of step 2, the best loss (0.25) of the checkpoints kept"
    why = "; not compared, as measured on other rows or with other settings: step-00000001"
    best, choice = best_of_run(tmp_path, LOSS)
    assert (best.folder, choice) == (chosen, sentence + why)
    (make_checkpoint(tmp_path, 4, 0.1) / "rng-00000.safetensors").unlink()
    left_out = "; left out, as step-00000004 lacks rng-00000.safetensors"
    assert best_of_run(tmp_path, LOSS) == (best, sentence + why + left_out)
    with pytest.raises(UserError, match=" has rougeL, or only NaN: use last$") as refused:
        best_of_run(tmp_path, replace(LOSS, name="rougeL"))
    assert refused.value.printed_by == "run", "by every rank, whatever only rank 0 has found"


def test_gathers_of_fsdp1_are_no_work(monkeypatch, tmp_path):
    """Waiting for another GPU takes a core, so what gathers over the device must not count as work for the watchdog."""
    for gather, optimizer in (("model_tensors", None), ("state_tensors", "an optimizer")):
        monkeypatch.setattr(checkpoint, "enter_phase", enter_phase := Mock())
        monkeypatch.setattr(checkpoint, gather, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.load_weights(tmp_path, None, optimizer)
        assert enter_phase.call_args == call("loading the checkpoint"), "without counts_cpu"


def test_all_of_the_state_between_steps_comes_back():
    skips = SkipHistory(num_skipped=2, num_in_a_row=1, grad_norms=[0.5, None], num_grad_norms=1)
    state = TrainState(3, 0.5, 2, 0.75, evaluation_due=True, skips=skips, metrics={"loss": 0.5})
    assert all(value != default for value, default in zip(astuple(state), astuple(TrainState()), strict=True))
    assert all(value != default for value, default in zip(astuple(skips), astuple(SkipHistory()), strict=True))
    manifest = {"step": state.step, "metrics": state.metrics, "state": state.in_manifest()}
    assert TrainState.from_manifest(json.loads(json.dumps(manifest))) == state


def test_buffers_that_training_changes_are_saved_and_what_is_frozen_is_not():
    model = nn.Sequential(nn.Linear(2, 2, bias=False).requires_grad_(False), nn.BatchNorm1d(2))
    sharded = SimpleNamespace(model=model, unwrapped=model)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert sorted(model_tensors(sharded)) == sorted(f"model.1.{name}" for name in names)
