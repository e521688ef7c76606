"""The summary of all rows: lengths, duplicates over both splits, special tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.chats import build_chat_tokenizer
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.prepare import prepare_rows
from toolkit.tools.preview.summary import MOST_BINS, PERCENTILES, summarize

SOURCE = """
def load_rows(config):
    for number in range(40):
        yield {"text": "it is four " * (1 + number % 7), "split": "train"}
    yield {"text": "thanks <s>", "split": "train"}
    yield {"text": "it is four it is four ", "split": "eval"}
    yield {"text": "welcome", "split": "eval"}
"""


def test_the_summary_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(SOURCE)
    build_chat_tokenizer().save_pretrained(tmp_path / "model")
    config = LLMDataConfig(source=f"{tmp_path}/rows.py:load_rows", cache_dir=str(tmp_path / "cache"), max_length_tokens=16)
    rows = prepare_rows(config, ModelConfig(name_or_path=str(tmp_path / "model")), 400)
    summary = summarize(rows, rows.evaluation, config, "a model")

    # Splits.
    training, evaluation = summary["splits"]
    assert (training["name"], training["num_rows"], evaluation["num_rows"]) == ("training", len(rows.train), 2)
    assert training["num_tokens"] == sum(rows.train["num_tokens"])
    # Lengths: the bins hold every row, and percentiles are lengths of rows.
    lengths, counted = summary["lengths"]
    tokens = np.array(rows.train["num_tokens"])
    assert lengths["setting"] == "data.max_length_tokens 16" and counted["setting"] is None
    for low, high, count in lengths["bins"]:
        assert count == ((tokens >= low) & (tokens <= high)).sum()
    assert sum(count for _, _, count in lengths["bins"]) == len(tokens) and len(lengths["bins"]) <= MOST_BINS
    assert list(lengths["percentiles"]) == list(map(str, PERCENTILES)) and set(lengths["percentiles"].values()) <= set(
        tokens.tolist()
    )
    assert (lengths["percentiles"]["0"], lengths["percentiles"]["100"]) == (tokens.min(), tokens.max())
    # Duplicates, within the training rows and over both splits.
    sentences = " ".join(summary["duplicates"])
    assert "33 of 41" in sentences and "1 of 2" in sentences
    assert (
        "row 7 repeats row 0; row 8 repeats row 1" in sentences and "row 41 (evaluation) is row 1 (training) again" in sentences
    )
    assert not set(summary["duplicates"]).intersection(summary["remarks"])
    # Special tokens, also one that a row writes.
    tokens_by_text = {token["text"]: token for token in summary["special_tokens"]}
    assert tokens_by_text["<s>"]["num_in_training"] == 1 and tokens_by_text["</s>"]["num_in_training"] == 41
    assert "eos_token" in tokens_by_text["</s>"]["roles"]


def test_any_lengths_fit_few_bins() -> None:
    from toolkit.tools.preview.summary import _spread

    draw = np.random.default_rng(0)
    for largest in (1, 2, 15, 16, 17, 999, 1024, 10**6):
        lengths = draw.integers(0, largest, size=50, endpoint=True)
        spread = _spread("row", lengths, None)
        assert sum(count for _, _, count in spread["bins"]) == 50 and len(spread["bins"]) <= MOST_BINS
        assert spread["bins"][0][0] <= lengths.min() and spread["bins"][-1][1] >= lengths.max()
