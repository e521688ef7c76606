"""An argument of another trainer, given as a flag, is answered with its line of `toolkit/config/migrating.md`."""

import dataclasses
import inspect
import re

import pytest

from tests.support.launch import REPOSITORY
from toolkit.config.load import load_config
from toolkit.config.messages import find_meanings, known_keys, suggestion
from toolkit.config.schema import LLMConfig, PreferenceConfig, SummarizationConfig

PAGE = (REPOSITORY / "toolkit" / "config" / "migrating.md").read_text(encoding="utf-8")
CLASSES = {"recipes/t5.py": SummarizationConfig, "recipes/llm.py": LLMConfig, "recipes/dpo.py": PreferenceConfig}
FIELD = re.compile(r"`(\S+)`( \(.+\))?")
TABLES = PAGE.split("\n## ")[1:]


def rows_of(table: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)


@pytest.mark.parametrize("table", TABLES, ids=[table.partition("\n")[0] for table in TABLES])
def test_a_flag_is_answered_with_its_line(table):
    config_classes = [found for script, found in CLASSES.items() if script in table.partition("|")[0]]
    wrong = []
    for name, line in rows_of(table):
        key = FIELD.fullmatch(line)
        having = [found for found in config_classes if not key or key[1] in known_keys(found)[0]]
        answers = [suggestion(name.split(".")[-1], found) for found in having]
        expected = f"did you mean {key[1]}{key[2] or ''}?" if key else line
        wrong += [(name, line, answers)] * (not answers or any(expected not in answer for answer in answers))
    assert rows_of(table) and not wrong


@pytest.mark.parametrize("config_class", [SummarizationConfig, LLMConfig])
def test_a_name_means_one_field_of_a_recipe_or_none(config_class):
    fields = known_keys(config_class)[0]
    for name, line in rows_of(PAGE):
        name = name.split(".")[-1]
        meanings = find_meanings(name)
        assert len({field for field, _, _ in meanings if field in fields}) <= 1, name
        is_field = FIELD.fullmatch(line) is not None
        assert meanings and all((sentence == "") == is_field for _, _, sentence in meanings), name
        assert is_field or name not in {field.rpartition(".")[2] for field in fields}, name


def test_every_argument_of_the_seq2seq_trainer_has_a_line():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    listed = {name for name, _ in rows_of(TABLES[0])}
    of_trainer = set(inspect.signature(Seq2SeqTrainer.__init__).parameters) - {"self", "model", "args"}
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} | of_trainer <= listed


def test_a_line_that_says_what_to_write_is_a_run_yaml_that_loads():
    """What a script of Seq2SeqTrainer becomes, by the page: an evaluation per epoch, and the best model at the end."""
    flags = ["--eval.every_epochs=1", "--checkpoint.every_epochs=1", "--export.weights=best", "--checkpoint.keep_best=1"]
    flags += ["--eval.best_metric=rougeL", "--optim.warmup_ratio=0.06", "--optim.schedule=cosine", "--optim.min_lr_ratio=0.1"]
    load_config(SummarizationConfig, ["--model.name_or_path=a", "--data.files=b.csv", "--train.num_epochs=3", *flags])
    flags = ["--adapter.method=rslora", "--adapter.target_modules=all-linear", "--data.loss_on=completions"]
    load_config(LLMConfig, ["--model.name_or_path=a", "--data.files=b.jsonl", "--train.num_epochs=3", *flags])
