"""Rows and generated texts may fill a model's positions, and not exceed them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BartConfig, LlamaConfig, T5Config

from toolkit.config.schema import EvalConfig
from toolkit.errors import UserError
from toolkit.models.position_limits import check_positions

LLAMA = LlamaConfig(max_position_embeddings=32)
BART = BartConfig(max_position_embeddings=32)


@pytest.mark.parametrize(
    ("config", "fits", "longer", "what", "setting"),
    [
        (LLAMA, {"row": 32, "prompt": 24}, {"row": 33, "prompt": 24}, "the longest row has 33", "data.max_length_tokens"),
        (
            LLAMA,
            {"row": 9, "prompt": 24},
            {"row": 9, "prompt": 25},
            "a prompt has up to 25 tokens and eval.max_new_tokens is 8, together 33",
            "data.max_length_tokens plus eval.max_new_tokens",
        ),
        (BART, {"source": 32, "target": 9}, {"source": 33, "target": 9}, "", "data.max_source_length_tokens"),
        (BART, {"source": 9, "target": 32}, {"source": 9, "target": 33}, "", "data.max_target_length_tokens"),
    ],
)
def test_a_limit_is_the_last_length_that_fits(config: Any, fits: Any, longer: Any, what: str, setting: str) -> None:
    check_positions(config, "tiny", fits, EvalConfig(max_new_tokens=8))
    with pytest.raises(UserError, match=f"{what} tokens, but tiny has only 32 positions: set .*{setting} to at most 32$"):
        check_positions(config, "tiny", longer, EvalConfig(max_new_tokens=8))


def test_what_is_not_generated_takes_no_position() -> None:
    for evaluation, prompt in ((EvalConfig(max_new_tokens=33, generate=False), 9), (EvalConfig(max_new_tokens=33), 0)):
        check_positions(LLAMA, "tiny", {"row": 9, "prompt": prompt}, evaluation)
    check_positions(BART, "tiny", {"source": 9, "target": 9}, EvalConfig(max_new_tokens=33, generate=False))
    check_positions(T5Config(), "tiny", {"source": 9000, "target": 9000}, EvalConfig(max_new_tokens=9000))
    with pytest.raises(UserError, match=r"a generated text may have 33 tokens, but tiny has only 32 positions"):
        check_positions(BART, "tiny", {"source": 9, "target": 9}, EvalConfig(max_new_tokens=33))
