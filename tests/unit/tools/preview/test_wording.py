"""A long text is shown at its start, around cuts and at its end, each part once and in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from toolkit.tools.preview.row import CONTEXT, LOST, PADDING, RowView, Side
from toolkit.tools.preview.wording import _describe_row, shorten_text, shorten_tokens
from toolkit.tools.report.parts import Lines


def test_the_begin_the_cuts_and_the_end_are_shown_once() -> None:
    kinds = [(CONTEXT, 0, 10), (LOST, 10, 15), (CONTEXT, 15, 500), (LOST, 500, 1000)]
    tokens = [(kind, str(number)) for kind, first, last in kinds for number in range(first, last)]
    pieces = shorten_tokens(tokens, 7, is_whole=False)
    remarks = ["… 300 tokens are not shown: --row 7 shows all …", "… 380 tokens are not shown: --row 7 shows all …"]
    assert [piece for piece in pieces if isinstance(piece, str)] == remarks
    shown = [token for piece in pieces if not isinstance(piece, str) for token in piece]
    assert shown == tokens[:160] + tokens[460:540] + tokens[920:]
    assert shorten_tokens(tokens, 7, is_whole=True) == [tokens]


def test_a_long_text_is_shown_at_its_begin_and_its_end() -> None:
    text = "".join(map(chr, range(1000, 3500)))
    remark = "… 1,300 characters are not shown: --row 7 shows all …"
    assert shorten_text(text, 7, is_whole=False) == [text[:800], remark, text[2100:]]
    assert shorten_text(text[:1200], 7, is_whole=False) == shorten_text(text[:1200], 7, is_whole=True) == [text[:1200]]


def test_padding_follows_the_last_row_of_a_pack() -> None:
    pack = SimpleNamespace(rank=0, micro_batch=0, row_ids=[4, 5], padding={"row": 3})
    step: Any = SimpleNamespace(find_pack={4: pack, 5: pack}.get)
    side = Side(name="row", text="", tokens=[], num_tokens=1, num_lost=0, limit=1)
    facts: Any = {"where": "", "split": "", "num_tokens": 1, "num_label_tokens": 1, "turns": [], "piece": None}
    rows = [RowView(row_id=row_id, sides=[side], **facts) for row_id in (4, 5, 6)]
    padding = Lines(["3 tokens of padding"], PADDING)
    assert [padding in [*_describe_row(row, step, is_whole=False)] for row in rows] == [False, True, False]
    assert padding not in [*_describe_row(rows[1], None, is_whole=False)]
