"""Texts that were cut off, are empty or repeat themselves are found; normal ones are not."""

import inspect
import json
import pydoc
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import seq2seq_families
from tests.support.eval_rows import rows_for
from tests.support.tiny_models import one_process
from toolkit.config.schema import EvalConfig
from toolkit.evaluation import loop
from toolkit.evaluation.generate import FLAWS, describe_flaws, find_flaws, repeats_itself
from toolkit.evaluation.metrics import OUR_FIGURES
from toolkit.parallel import wrap

CUT, EMPTY, REPEATING = FLAWS
END = 1


LOOPS = [
    "Return the Return the Return the Return the",
    "Return the Return the Return the Return the Ret",  # cut off within a word
    "raises ValueError, calls _un_read_read_read_read_read_read_read_read_read_read_read_read_read",
    "He found it. " + "The oar is here. " * 5 + "The oar",
    "还桨还桨还桨还桨还桨还桨",
    "وأضاف أن " * 6,
    "word " * 8,
]
NORMAL = [
    *("", "no no no no", "x = [0, 0, 0, 0]", "the values are 1.0, 1.0, 1.0, 1.0", "Notes\n" + "-" * 60),
    "Return the oar. Return the oar. Return the oar.",  # three times
    "[0., 0., 1., 0., 1., 0., 0., 0.],\n" * 8,
    "| a | b | c |\n| - | - | - |\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |",
    "1. Open it.\n2. Close it.\n3. Open it.\n4. Close it.\n5. Open it.",
    "The oar is here. " * 4 + "Then they rowed home, all of them, and nobody spoke of it again.",
]


def test_a_loop_at_the_end_is_found_and_none_in_a_normal_text():
    assert [text for text in LOOPS + NORMAL if repeats_itself(text)] == LOOPS


def test_texts_that_people_wrote_give_no_alarm():
    """Docstrings, long and short, and the pages of this repository with their tables and code."""
    modules = [json, inspect, pydoc, torch, torch.nn.functional, torch.optim]
    texts = [value.__doc__ for module in modules for value in (module, *vars(module).values()) if getattr(value, "__doc__", None)]
    root = Path(__file__).parents[3]
    for page in {*root.glob("docs/*.md"), *root.glob("*.md")} - {root / "docs/support.md"}:  # whose cells do repeat
        texts += page.read_text(encoding="utf-8").split("\n\n")
    assert len(texts) > 1000
    assert [text for text in texts if isinstance(text, str) and repeats_itself(text)] == []


@pytest.mark.parametrize(
    ("tokens", "texts", "eos", "forced", "expected"),
    [
        ([[5, 6, 7], [5, END, 0], [5, 6, END]], "aaa", END, None, [(CUT,), (), ()]),  # an end at the last place is an end
        ([[5, 6], [5, END]], "aa", END, None, [(), ()]),  # all ended before the limit
        ([[5, 6, 7], [5, 6, 9]], "aa", [END, 9], None, [(CUT,), ()]),
        ([[5, 6, 7]], "a", None, None, [(CUT,)]),
        ([[END, 6, 7, 8]], "a", [], None, [(CUT,)]),  # beyond the limit, as of a rank that waits for others
        ([[5, 6, END], [5, END, 0]], "aa", END, END, [(CUT,), ()]),  # the model is forced to write that end
        ([[5, 6, 7], [5, END, 0]], ["a " * 9, " \n"], END, None, [(CUT, REPEATING), (EMPTY,)]),
    ],
)
def test_a_text_without_an_end_token_was_cut_off_and_white_space_is_empty(tokens, texts, eos, forced, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(forced_eos_token_id=forced))
    assert find_flaws(model, torch.tensor(tokens), list(texts), 3, eos) == expected


def test_kinds_are_counted_apart_with_the_key_that_changes_them_and_nothing_is_said_of_sound_texts():
    sound = {"num_texts": 1234, CUT: 0, EMPTY: 0, REPEATING: 0}
    assert describe_flaws(sound) == describe_flaws({"loss": 1.0}) == ""
    assert describe_flaws(sound | {CUT: 1000, REPEATING: 1}) == (
        "of 1,234 texts, 1,000 reached max_new_tokens (raise eval.max_new_tokens), 1 ended in a repetition "
        "(eval.no_repeat_ngram_size 3 forbids it)"
    )
    assert "2 came out empty (train longer, or set fewer eval.num_beams)" in describe_flaws(sound | {EMPTY: 2})
    keys = re.findall(r"\{\}(\w+)", " ".join(FLAWS.values()))
    assert len(keys) == 3 and all(hasattr(EvalConfig(), key) for key in keys)
    assert set(FLAWS) < set(OUR_FIGURES), "no metric of a user's may have these names"


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_evaluation_counts_what_it_generated(family, batch_size, tmp_path, monkeypatch):
    """The same in every batch size, although shorter texts of a batch are padded to its longest."""
    model = seq2seq_families.build_model(family)
    data, end = rows_for(model), model.generation_config.eos_token_id
    written = {0: [7, end], 1: [], 2: [8, 9, 7, 5, 6], 3: [9, 9, 9, end]}
    places: list[int] = []

    def generated(input_ids: torch.Tensor, **options) -> torch.Tensor:
        assert options["max_new_tokens"] == 5
        rows = [[row[0] for row in data.rows["input_ids"]].index(ids[0]) for ids in input_ids.tolist()]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        places.extend(rows)
        texts = [written[row] or [end] for row in rows]
        length = max(map(len, texts))
        return torch.tensor([[model.config.decoder_start_token_id, *text, *[0] * (length - len(text))] for text in texts])

    monkeypatch.setattr(model, "generate", generated)
    sharded = wrap.shard_model(one_process(), model)
    config = EvalConfig(max_new_tokens=5, batch_size_rows=batch_size)
    figures = loop.evaluate(config, sharded, data, tmp_path / "p.jsonl", lambda: None)
    assert sorted(places) == [0, 1, 2, 3]
    assert {name: figures[name] for name in ("num_texts", *FLAWS)} == {"num_texts": 4, CUT: 1, EMPTY: 1, REPEATING: 0}
