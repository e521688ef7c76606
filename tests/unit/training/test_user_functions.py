"""Functions given to a run, against its config."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit import UserError, load_config
from toolkit.evaluation.metrics import describe_code
from toolkit.training.user_functions import Own, check_own

NEEDED = {"model.name_or_path": "model", "train.max_steps": 2, "data.source": "some/rows"}


@pytest.mark.parametrize(
    ("overrides", "own", "sentence"),
    [
        ({"optim.label_smoothing": 0.1}, Own(loss=lambda *_: None), "optim.label_smoothing is 0.1, but loss takes the place of"),
        (
            {"eval.generate": False},
            Own(metrics={"length": len}),
            "metrics length score generated texts: set eval.generate to true$",
        ),
        (
            {"eval.generate": False, "eval.metrics": ["chrf"]},
            Own(),
            "metrics chrf score generated texts: set eval.generate to true$",
        ),
        (
            {},
            Own(metrics=["chrf"]),  # type: ignore[arg-type]
            r"metrics is \['chrf'\]: give functions by their names; eval.metrics names modules$",
        ),
        ({}, Own(after_step=3), "after_step is a int, and cannot be called: give a function$"),  # type: ignore[arg-type]
        ({}, Own(metrics={"bleu": "bleu"}), r"metrics\['bleu'\] is a str, and cannot be called"),  # type: ignore[dict-item]
    ],
)
def test_functions_that_do_not_fit_are_refused(overrides: dict[str, Any], own: Own, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_own(load_config("t5", overrides=NEEDED | overrides), own)


def test_code_is_known_by_its_source() -> None:
    def length(predictions: list[str], references: list[str]) -> int:
        return sum(map(len, predictions))

    first = describe_code(length)

    def length(predictions: list[str], references: list[str]) -> int:  # type: ignore[no-redef]
        return sum(map(len, references))

    assert describe_code(length) != first and describe_code(length).rsplit(" ")[0] == first.rsplit(" ")[0]
    assert describe_code(len) == "len"
