"""The summary of all rows: lengths, duplicates over both splits, special tokens."""

import numpy as np
import pytest

from tests.support.chats import build_chat_tokenizer
from tests.support.rows import prepare_rows
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.collate import CausalCollator
from toolkit.evaluation.rows import EvaluationRows
from toolkit.objectives import built_in
from toolkit.tools.preview.summary import MOST_BINS, PERCENTILES, _spread, summarize

SOURCE = """
def load_rows(config):
    for number in range(40):
        yield {"text": "it is four " * (1 + number % 7), "split": "train"}
    yield {"text": "thanks <s>", "split": "train"}
    yield {"text": "it is four it is four ", "split": "eval"}
    yield {"text": "welcome", "split": "eval"}
"""


def test_the_summary_of_rows(tmp_path):
    (tmp_path / "rows.py").write_text(SOURCE)
    build_chat_tokenizer().save_pretrained(tmp_path / "model")
    config = LLMDataConfig(source=f"{tmp_path}/rows.py:load_rows", cache_dir=str(tmp_path / "cache"), max_length_tokens=16)
    rows = prepare_rows(config, ModelConfig(name_or_path=str(tmp_path / "model")), 400)
    evaluation = EvaluationRows(rows.evaluation, rows.tokenizer, CausalCollator(0), built_in(config.objective))
    summary = summarize(rows, evaluation, config, "a model")
    training, evaluation = summary["splits"]
    assert (training["name"], training["num_rows"], evaluation["num_rows"]) == ("training", len(rows.train), 2)
    assert training["num_tokens"] == sum(rows.train["num_tokens"])
    # Percentiles are lengths of rows.
    lengths, counted = summary["lengths"]
    tokens = np.array(rows.train["num_tokens"])
    assert lengths["setting"] == "data.max_length_tokens 16" and counted["setting"] is None
    assert list(lengths["percentiles"]) == list(map(str, PERCENTILES))
    assert {*lengths["percentiles"].values()} <= {*tokens.tolist()}
    assert (lengths["percentiles"]["0"], lengths["percentiles"]["100"]) == (tokens.min(), tokens.max())
    # Duplicates, within the training rows and over both splits.
    sentences = " ".join(summary["duplicates"])
    row_ids = ("row 7 repeats row 0; row 8 repeats row 1", "row 41 (evaluation) is row 1 (training) again")
    assert all(words in sentences for words in ("33 of 41", "1 of 2", *row_ids))
    assert not set(summary["duplicates"]).intersection(summary["remarks"])
    # Special tokens, also one that a row writes.
    tokens_by_text = {token["text"]: token for token in summary["special_tokens"]}
    assert tokens_by_text["<s>"]["num_in_training"] == 1 and tokens_by_text["</s>"]["num_in_training"] == 41
    assert "eos_token" in tokens_by_text["</s>"]["roles"]


@pytest.mark.parametrize("largest", [1, 2, 15, 16, 17, 999, 1024, 10**6])
def test_any_lengths_fit_few_bins_which_hold_every_row(largest):
    lengths = np.random.default_rng(0).integers(0, largest, size=50, endpoint=True)
    bins = _spread("row", lengths, None)["bins"]
    assert all(count == ((lengths >= low) & (lengths <= high)).sum() for low, high, count in bins)
    assert sum(count for *_, count in bins) == 50 and len(bins) <= MOST_BINS
    assert bins[0][0] <= lengths.min() and bins[-1][1] >= lengths.max()
