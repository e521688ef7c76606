"""What the tests of tokens share."""

from collections.abc import Callable

import pytest

from tests.support.model_folders import save_jsonl
from tests.support.rows import prepare_rows
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.prepare import TokenizedRows


@pytest.fixture
def prepare(tmp_path) -> Callable[..., TokenizedRows]:
    """The tokens of rows, by a tokenizer, as a run of the LLM recipe makes them, or another with `section`."""

    def prepare(tokenizer, rows: list[dict], section=LLMDataConfig, **settings) -> TokenizedRows:
        tokenizer.save_pretrained(tmp_path / "model")
        files = str(save_jsonl(tmp_path / "rows.jsonl", rows))
        settings = {"cache_dir": str(tmp_path / "cache"), "eval_fraction": 0.0} | settings
        config = section(source="jsonl", files=files, **settings)
        return prepare_rows(config, ModelConfig(name_or_path=str(tmp_path / "model")), len(tokenizer))

    return prepare
