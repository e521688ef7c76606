"""`docs/migrating.md` says of each argument of another trainer what the answer to it as a flag says."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.support.launch import REPOSITORY
from toolkit.config.messages import suggestion
from toolkit.config.schema import LLMConfig, SummarizationConfig

PAGE = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
CLASSES = {"recipes/t5.py": SummarizationConfig, "recipes/llm.py": LLMConfig}
TABLES = PAGE.split("\n## ")[1:]


def rows_of(table: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)


@pytest.mark.parametrize("table", TABLES, ids=[table.partition("\n")[0] for table in TABLES])
def test_a_flag_is_answered_with_its_line(table: str) -> None:
    config_class = next(found for script, found in CLASSES.items() if script in table.partition("|")[0])
    wrong = []
    for name, line in rows_of(table):
        answer = suggestion(name.split(".")[-1], config_class)
        is_key = line.startswith("`") and line.endswith("`")
        if (f"did you mean {line.strip('`')}?" if is_key else line) not in answer:
            wrong.append((name, line, answer))
    assert rows_of(table) and not wrong


def test_every_argument_of_the_seq2seq_trainer_has_a_line() -> None:
    from transformers import Seq2SeqTrainingArguments

    listed = {name for name, _ in rows_of(TABLES[0])}
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} <= listed
