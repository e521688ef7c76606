"""Which checkpoint is the best, and which are kept."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import LOSS, make_checkpoint, names, prune_to, ranked
from toolkit.checkpoint.manifest import MANIFEST, list_checkpoints, step_folder

NAN = float("nan")


@pytest.mark.parametrize(
    ("higher_is_better", "new", "old", "is_gain"),
    [
        (False, 1.0, None, True),
        (False, NAN, None, False),
        (False, NAN, 1.0, False),
        (False, 0.9, 1.0, True),
        (False, 1.0, 1.0, False),
        (True, 0.9, 1.0, False),
        (True, 1.1, 1.0, True),
        (True, 1.0, 1.0, False),
        (True, NAN, None, False),
    ],
)
def test_a_nan_is_never_the_best(higher_is_better: bool, new: float, old: float | None, is_gain: bool) -> None:
    assert replace(LOSS, higher_is_better=higher_is_better).is_better(new, old) is is_gain


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, NAN), (5, 0.8), (6, 0.7)):
        last = make_checkpoint(tmp_path, step, loss)
    assert prune_to(tmp_path, last, keep_last=2, keep_best=2) == ([step_folder(tmp_path, 1), step_folder(tmp_path, 4)], [])
    assert names(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 5, 6)]
    assert [found.checkpoint.step for found in ranked(tmp_path, LOSS)] == [2, 3, 6, 5]
    assert [found.checkpoint.step for found in ranked(tmp_path, LOSS, last_step=5)] == [2, 3, 5]
    assert [found.checkpoint.step for found in ranked(tmp_path, replace(LOSS, higher_is_better=True))] == [5, 6, 3, 2]
    assert ranked(tmp_path, replace(LOSS, metric="rougeL")) == []
    # The newest is kept whatever it was measured on, and what was just written beside later ones that are damaged.
    newest = make_checkpoint(tmp_path, 7, 0.4, OTHER)
    assert prune_to(tmp_path, newest, keep_last=1, keep_best=1)[1] == [] and names(tmp_path) == ["step-00000002", "step-00000007"]
    just_written = make_checkpoint(tmp_path, 4, 0.1)
    (newest / MANIFEST).unlink()
    prune_to(tmp_path, just_written)
    assert [folder for _, folder in list_checkpoints(tmp_path)] == [just_written, newest]


def test_what_is_not_whole_is_neither_counted_nor_removed_nor_best(tmp_path: Path) -> None:
    whole, truncated, bare = (make_checkpoint(tmp_path, step, loss=1 / step) for step in (1, 2, 3))
    (truncated / "rng-00000.safetensors").write_bytes(b"")
    (bare / MANIFEST).unlink()
    last = make_checkpoint(tmp_path, 4, loss=2.0)
    assert prune_to(tmp_path, last, keep_last=2) == ([], [])
    assert ranked(tmp_path, LOSS)[0].checkpoint.folder == whole


def test_nothing_is_removed_where_the_one_just_written_is_not_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        last = make_checkpoint(tmp_path, step)
    (last / "rng-00000.safetensors").unlink()
    sentence = "no checkpoint was removed, as the one just written is not whole: step-00000003 lacks rng-00000.safetensors"
    assert prune_to(tmp_path, last) == ([], [sentence])
    assert len(list_checkpoints(tmp_path)) == 3


def test_pruning_goes_on_where_one_cannot_be_removed_and_tries_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, last = (make_checkpoint(tmp_path, step) for step in (1, 2, 3))
    (step_folder(tmp_path, 9).with_name("step-00000009.tmp")).mkdir()
    real = shutil.rmtree

    def rmtree(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "step-00000001.removing":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    sentence = f"{first} could not be removed (Permission denied): the next save tries again"
    assert prune_to(tmp_path, last) == ([second], [sentence])
    assert names(tmp_path) == ["step-00000001.removing", "step-00000003"]
    monkeypatch.undo()
    assert prune_to(tmp_path, last) == ([], [])
    assert names(tmp_path) == ["step-00000003"]


OTHER, THIRD = {"rows": "b", "num_beams": 1}, {"rows": "c", "num_beams": 1}


def test_figures_of_other_rows_are_not_compared_with_those_of_these(tmp_path: Path) -> None:
    """Step 1 has the lowest loss, of rows that were easier; steps 2 and 3 were measured on the same."""
    for step, loss, rows in ((1, 0.1, THIRD), (2, 0.3, OTHER), (3, 0.2, OTHER), (4, 0.6, None), (5, 0.7, None)):
        last = make_checkpoint(tmp_path, step, loss, rows)
    order = [(found.checkpoint.step, found.is_comparable) for found in ranked(tmp_path, LOSS)]
    assert order == [
        (4, True),
        (5, True),
        (3, False),
        (2, False),
        (1, False),
    ]
    removed, _ = prune_to(tmp_path, last, keep_last=1, keep_best=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert removed == [step_folder(tmp_path, step) for step in (1, 2, 3)]


@pytest.mark.parametrize(("compared", "order"), [(("rows",), [1, 2]), (("rows", "num_beams"), [2, 1])])
def test_how_texts_are_generated_matters_to_figures_of_texts_alone(
    tmp_path: Path, compared: tuple[str, ...], order: list[int]
) -> None:
    make_checkpoint(tmp_path, 1, 0.3, {"rows": "a", "num_beams": 4})
    make_checkpoint(tmp_path, 2, 0.5, {"rows": "a", "num_beams": 1})
    assert [found.checkpoint.step for found in ranked(tmp_path, replace(LOSS, compared=compared))] == order
