"""What a resume takes over, and disks that refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint import _check_identity, _train_state
from toolkit.errors import UserError
from toolkit.train_state import Identity, TrainState

SETTINGS = {"optim.lr": 1e-3, "eval.best_metric": "loss", "mixed_precision": "bf16"}


def identity(model_config_hash: str = "m", **changes: Any) -> Identity:
    return Identity({**SETTINGS, **changes}, model_config_hash, data_fingerprint="d", frozen_hashes={})


@pytest.mark.parametrize(("metric", "best_value", "count"), [("loss", 0.5, 2), ("rougeL", None, 0)])
def test_the_best_value_is_forgotten_where_the_metric_changes(metric: str, best_value: float | None, count: int) -> None:
    state = {"best_value": 0.5, "num_evaluations_without_gain": 2}
    manifest = {"step": 7, "metrics": {"loss": 0.6}, "state": state, "identity": {"config": SETTINGS}}
    expected = TrainState(7, best_value, count, metrics={"loss": 0.6})
    assert _train_state(manifest, identity(**{"eval.best_metric": metric})) == expected


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (identity(mixed_precision="no"), "mixed_precision is 'no', but step-00000003 was made with 'bf16'"),
        (identity("other"), "the model's config.json is not the one step-00000003 was trained with"),
    ],
)
def test_precision_and_model_config_belong_to_a_run(ours: Identity, sentence: str) -> None:
    theirs = {"config": SETTINGS, "model_config_hash": "m", "data_fingerprint": "d", "frozen_hashes": {}}
    _check_identity(Path("step-00000003"), theirs, identity())
    with pytest.raises(UserError, match=f"^{sentence}: set it back"):
        _check_identity(Path("step-00000003"), theirs, ours)


def test_files_of_a_mix_may_move_but_its_weights_may_not_change() -> None:
    ours, moved, reweighted = (
        identity(**{"data.mix": [{"source": "jsonl", "weight": weight, "files": files}]})
        for weight, files in ((2.0, "a.jsonl"), (2.0, "elsewhere/a.jsonl"), (1.0, "a.jsonl"))
    )
    theirs = {"config": ours.config, "model_config_hash": "m", "data_fingerprint": "d", "frozen_hashes": {}}
    _check_identity(Path("step-00000003"), theirs, moved)
    with pytest.raises(UserError, match="^data.mix is "):
        _check_identity(Path("step-00000003"), theirs, reweighted)


def test_a_changed_base_is_named_by_its_first_tensor() -> None:
    theirs = {"config": SETTINGS, "model_config_hash": "m", "data_fingerprint": "d", "frozen_hashes": {"a": "1", "b": "2"}}
    ours = Identity(SETTINGS, "m", data_fingerprint="d", frozen_hashes={"a": "1", "b": "3"})
    with pytest.raises(UserError, match="1 differ, b first"):
        _check_identity(Path("step-00000003"), theirs, ours)


@pytest.mark.parametrize(
    ("key", "as_before", "other"), [("optim.skip_beyond_sigmas", None, 4.0), ("optim.skip_window_steps", 100, 50)]
)
def test_a_key_newer_than_the_checkpoint_may_not_change_the_run(key: str, as_before: Any, other: Any) -> None:
    theirs = {"config": SETTINGS, "model_config_hash": "m", "data_fingerprint": "d", "frozen_hashes": {}}
    _check_identity(Path("step-00000003"), theirs, identity(**{key: as_before}))
    with pytest.raises(UserError, match=f"^{key} is {other}, but step-00000003 was made with {as_before}"):
        _check_identity(Path("step-00000003"), theirs, identity(**{key: other}))


def test_the_best_value_is_forgotten_where_other_rows_are_evaluated() -> None:
    state = {"best_value": 0.5, "num_evaluations_without_gain": 2}
    manifest = {"step": 7, "metrics": {}, "state": state, "identity": {"config": {**SETTINGS, "eval.num_rows": 10}}}
    assert _train_state(manifest, identity(**{"eval.num_rows": 10})).best_value == 0.5
    assert _train_state(manifest, identity(**{"eval.num_rows": 20})).best_value is None
