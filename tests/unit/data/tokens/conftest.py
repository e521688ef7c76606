"""What the tests of tokens share."""

from collections.abc import Callable

import pytest

from tests.support.rows import prepare_rows, write_objects
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.prepare import TokenizedRows


@pytest.fixture
def prepare(tmp_path) -> Callable[..., TokenizedRows]:
    """The tokens of rows (a list, or what the settings say) by a tokenizer or that of a model, as a run of the LLM recipe makes
    them, or another with `section`."""

    def prepare(model, rows: list[dict] | None, section=LLMDataConfig, **settings) -> TokenizedRows:
        if not isinstance(model, ModelConfig):
            model.save_pretrained(tmp_path / "model")
            model = ModelConfig(name_or_path=str(tmp_path / "model"))
        if rows is not None:
            write_objects(tmp_path / "rows.jsonl", rows)
            settings = {"source": "jsonl", "files": str(tmp_path / "rows.jsonl")} | settings
        config = section(**{"cache_dir": str(tmp_path / "cache"), "eval_fraction": 0.0} | settings)
        return prepare_rows(config, model, 400)

    return prepare
