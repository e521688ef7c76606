"""What differs between kinds of task stands in `toolkit/tasks/`, so that another kind is one file there and its recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import toolkit
from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.tasks import causal, seq2seq

PACKAGE = Path(toolkit.__file__).parent
QUESTION = re.compile(
    r"isinstance\([^\n]*\b(LLMConfig|SummarizationConfig|LLMDataConfig|DataConfig|SummarizationCollator|CausalCollator)\b"
    r"|auto_class ==|\btask (is|==) |^from [^\n]*\b(LLMConfig|SummarizationConfig)\b",
    re.MULTILINE,
)
ASKING = ["config/python.py"]
"""Files that ask which task it is: the recipes by name."""


def test_no_code_asks_which_kind_of_task_it_is() -> None:
    core = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if "tools" not in path.parts]
    assert len(core) > 100
    assert [str(path) for path in core if QUESTION.search((PACKAGE / path).read_text(encoding="utf-8"))] == ASKING
    for line in (
        "if isinstance(config, LLMConfig):",
        "kind = 1 if isinstance(data, (int, DataConfig)) else 2",
        "if config.task is CAUSAL:",
    ):
        assert QUESTION.search(line)


@pytest.mark.parametrize(("section", "module"), [(DataConfig(), seq2seq), (LLMDataConfig(), causal)])
def test_a_config_knows_its_task_and_has_the_fields_that_the_task_names(
    section: DataConfig | LLMDataConfig, module: object
) -> None:
    task = section.task
    assert task is module.TASK  # type: ignore[attr-defined]
    assert all(getattr(section, limit) > 0 for limit in task.sides.values())
    assert len(task.lengths(5, 2)) == len(task.sides)
    assert sum(task.lengths(5, 2)) == 5
