"""What a resume takes over, and disks that refuse."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.checkpoint_files import LOSS, make_checkpoint
from toolkit import __version__
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint.find import best_value
from toolkit.checkpoint.load import best_of_run, check_identity, check_settings, describe_versions, forget_unequal
from toolkit.checkpoint.manifest import Checkpoint
from toolkit.checkpoint.state import Identity, TrainState
from toolkit.config.schema import LLMConfig
from toolkit.errors import UserError
from toolkit.launch.same_run import installed_versions

SETTINGS = {"optim.lr": 1e-3, "eval.best_metric": "loss", "mixed_precision": "bf16"}


def identity(model_config_hash: str = "m") -> Identity:
    return Identity(SETTINGS, model_config_hash, data_fingerprint="d", frozen_hashes={})


def saved(settings: dict[str, Any] = SETTINGS, frozen_hashes: dict[str, str] | None = None) -> Checkpoint:
    theirs = Identity(settings, "m", data_fingerprint="d", frozen_hashes=frozen_hashes or {})
    state = TrainState(3).in_manifest()
    return Checkpoint(Path("step-00000003"), {"step": 3, "metrics": {}, "state": state, "identity": asdict(theirs)})


@pytest.mark.parametrize(
    ("theirs", "ours", "reason", "keeps_metrics"),
    [
        ({}, {}, None, True),
        ({"num_beams": 4}, {}, None, False),
        ({"rows": "b"}, {}, "other rows are evaluated", False),
        ({"num_beams": 4}, {"compared": ("rows", "num_beams")}, "eval.num_beams is 1 now", False),
        ({}, {"metric": "rougeL"}, "eval.best_metric is rougeL now", True),
    ],
)
def test_the_best_value_is_forgotten_where_figures_would_not_be_equals(
    theirs: dict[str, Any], ours: dict[str, Any], reason: str | None, keeps_metrics: bool
) -> None:
    manifest = {
        "identity": {"config": SETTINGS},
        "measured_on": LOSS.measured_on | theirs,
    }
    state = TrainState(7, best_value=0.5, num_evaluations_without_gain=2, start_value=0.9, metrics={"loss": 0.6})
    sentence = forget_unequal(state, manifest, replace(LOSS, **ours))
    metrics = {"loss": 0.6} if keeps_metrics else {}
    if reason is None:
        assert sentence is None and state == TrainState(7, 0.5, 2, 0.9, metrics=metrics)
    else:
        assert sentence == f"the best loss so far, 0.5, is not compared with later values: {reason}"
        assert state == TrainState(7, metrics=metrics)


def test_precision_and_model_config_belong_to_a_run() -> None:
    check_settings(saved(), SETTINGS, LLMConfig)
    sentence = "mixed_precision is 'no', but step-00000003 was made with 'bf16'"
    with pytest.raises(UserError, match=f"^{sentence}: set it back in the accelerate YAML \\('no' without one\\) to resume"):
        check_settings(saved(), SETTINGS | {"mixed_precision": "no"}, LLMConfig)
    assert check_identity(saved(), identity()) == TrainState(3)
    with pytest.raises(UserError, match="^the model's config.json is not the one step-00000003 was trained with: set it back"):
        check_identity(saved(), identity("other"))


def test_files_of_a_mix_may_move_but_its_weights_may_not_change() -> None:
    ours, moved, reweighted = (
        {"data.mix": [{"source": "jsonl", "weight": weight, "files": files}]}
        for weight, files in ((2.0, "a.jsonl"), (2.0, "elsewhere/a.jsonl"), (1.0, "a.jsonl"))
    )
    check_settings(saved(ours), moved, LLMConfig)
    named = {"data.mix": [{**moved["data.mix"][0], "name": "news", "hub_subset": None, "hub_eval_split": None}]}
    check_settings(saved(ours), named, LLMConfig)  # of a version that had fewer keys
    with pytest.raises(UserError, match="^data.mix is "):
        check_settings(saved(ours), reweighted, LLMConfig)


@pytest.mark.parametrize("unset", ["", None])
def test_a_kind_of_file_may_follow_from_its_ending(unset: str | None) -> None:
    named, left_out = ({"data.source": source} for source in ("csv", unset))
    check_settings(saved(named), left_out, LLMConfig)
    check_settings(saved(left_out), {"data.source": "parquet"}, LLMConfig)
    check_settings(saved({"data.mix": [{"source": "csv"}]}), {"data.mix": [{"source": ""}]}, LLMConfig)
    with pytest.raises(UserError, match="^data.source is 'me/rows', but step-00000003 was made with 'csv'"):
        check_settings(saved(named), {"data.source": "me/rows"}, LLMConfig)


def test_other_tokens_are_refused_with_the_way_on() -> None:
    """Also those of the same rows, where another version of the toolkit makes them or trains their tokenizer again."""
    with pytest.raises(
        UserError, match="^the data is not what step-00000003 .*this version makes.*model.init_from starts a new run"
    ):
        check_identity(saved(), replace(identity(), data_fingerprint="e"))


def test_a_changed_base_is_named_by_its_first_tensor() -> None:
    with pytest.raises(UserError, match="1 differ, b first"):
        check_identity(saved(frozen_hashes={"a": "1", "b": "2"}), replace(identity(), frozen_hashes={"a": "1", "b": "3"}))


@pytest.mark.parametrize(("key", "off"), [("optim.skip_beyond_sigmas", None), ("optim.warmup_ratio", 0.0)])
def test_a_key_newer_than_the_checkpoint_may_not_change_the_run(key: str, off: float | None) -> None:
    check_settings(saved(), SETTINGS | {key: off}, LLMConfig)
    with pytest.raises(UserError, match=f"^{key} is 4.0, but step-00000003 was made with None"):
        check_settings(saved(), SETTINGS | {key: 4.0}, LLMConfig)


OTHER = {"rows": "b", "num_beams": 1}


def test_a_resume_under_other_versions_names_them() -> None:
    now = version("torch")
    assert describe_versions({"versions": installed_versions()}) is None and describe_versions({}) is None
    assert describe_versions({"versions": {"toolkit": __version__, "torch": "2.0", "peft": "0.1"}}) == (
        f"the checkpoint was made with torch 2.0 ({now} now), peft 0.1 ({version('peft')} now): later losses may differ a little"
    )


def test_the_best_saved_is_of_these_rows_and_of_steps_done(tmp_path: Path) -> None:
    """Without one every figure is the best: a run whose earlier best was never kept must keep the next."""
    assert best_value(tmp_path, LOSS, 9) is None
    make_checkpoint(tmp_path, 1, 0.1, OTHER)
    assert best_value(tmp_path, LOSS, 9) is None
    make_checkpoint(tmp_path, 2, 0.6)
    make_checkpoint(tmp_path, 12, 0.5)
    assert best_value(tmp_path, LOSS, 9) == 0.6


def test_checkpoints_that_only_rank_0_cannot_read_end_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("checkpoints: cannot be read")

    make_checkpoint(tmp_path, 1, 0.1)
    monkeypatch.setattr(checkpoint, "rank_checkpoints", refuse)
    with pytest.raises(UserError) as refused:
        best_of_run(tmp_path, LOSS)
    assert refused.value.printed_by == "run"


def test_without_any_checkpoint_the_weights_in_memory_are_the_choice(tmp_path: Path) -> None:
    """Somebody has removed all of them since the last save; the training must not be lost for that."""
    assert best_of_run(tmp_path, LOSS) == (
        None,
        f"{tmp_path} has no checkpoint any more to take the best from: exporting the last weights",
    )


def test_the_choice_of_the_best_names_what_was_not_compared(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1, 0.1, OTHER)
    chosen = make_checkpoint(tmp_path, 2, 0.25)
    make_checkpoint(tmp_path, 3, 0.5)
    sentence = "exporting the weights of step 2, the best loss (0.25) of the checkpoints kept"
    why = "; not compared, as measured on other rows or with other settings: step-00000001"
    best, choice = best_of_run(tmp_path, LOSS)
    assert best is not None and (best.folder, choice) == (chosen, sentence + why)
    (make_checkpoint(tmp_path, 4, 0.1) / "rng-00000.safetensors").unlink()
    left_out = "; left out, as step-00000004 lacks rng-00000.safetensors"
    assert best_of_run(tmp_path, LOSS) == (best, sentence + why + left_out)
    with pytest.raises(UserError, match="no checkpoint in .* has rougeL, or only NaN: take last$"):
        best_of_run(tmp_path, replace(LOSS, metric="rougeL"))


def test_gathers_of_fsdp1_are_no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Waiting for another GPU takes a core, so what gathers over the device must not count as work for the watchdog."""
    phases: list[str] = []
    monkeypatch.setattr(checkpoint, "at", lambda phase: phases.append(f"at {phase}"))
    monkeypatch.setattr(checkpoint, "working", lambda phase: phases.append(f"working {phase}"))
    monkeypatch.setattr(checkpoint, "check_identity", lambda *_: {})
    gathered: list[str] = []

    def gather(*_: Any) -> NoReturn:
        gathered.append(phases[-1] if phases else "")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "state_tensors", gather)
    monkeypatch.setattr(checkpoint, "model_tensors", gather)
    nothing: Any = None
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load_checkpoint(Checkpoint(tmp_path, {}), nothing, nothing, nothing)
    phases.clear()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load_weights(tmp_path, nothing)
    assert gathered == ["at loading the checkpoint"] * 2


def test_another_optimizer_is_refused_and_older_checkpoints_are_of_adamw() -> None:
    check_settings(saved(), SETTINGS | {"optim.name": "adamw"}, LLMConfig)
    for before, now in (({}, "adafactor"), ({"optim.name": "adafactor"}, "adamw")):
        was = before.get("optim.name", "adamw")
        with pytest.raises(UserError, match=rf"^optim.name is '{now}', but .* was made with '{was}': set it back to resume"):
            check_settings(saved(SETTINGS | before), SETTINGS | {"optim.name": now}, LLMConfig)
