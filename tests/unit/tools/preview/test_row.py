"""A row's view: the text of its tokens, its turns, and what a limit has cut off. The first step's view: every row once, and
the padding of the tensors that the ranks really get."""

import itertools
import json
import random
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import processors

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.rows import prepare_rows
from tests.support.tokenizer_kinds import EXACT_KINDS, draw_text
from toolkit.config.data import DataConfig, LLMDataConfig, PreferenceDataConfig, Seq2SeqPreferenceDataConfig
from toolkit.config.schema import ModelConfig, TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.data.collate import CausalCollator, SummarizationCollator
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.objectives import built_in
from toolkit.objectives.causal import Causal
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference import PairCollator, Preference, Seq2SeqPreference, SourcePairCollator
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.tools.preview.row import RowView, Token, Tokens, token_texts, view_row
from toolkit.tools.preview.step import CONTEXT, LOSS, LOST, PADDING, StepView, view_step
from toolkit.tools.preview.summary import _count as count


class Rows:
    """Tokenized rows with their settings."""

    def __init__(self, folder: Path, rows: list[dict], is_llm: bool, **settings) -> None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)
        if not is_llm:
            end = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)])
            tokenizer._tokenizer.post_processor = end
        tokenizer.save_pretrained(folder / "model")
        self.model = ModelConfig(name_or_path=str(folder / "model"))
        is_pair = "rejected" in rows[0]
        kind = [[DataConfig, LLMDataConfig], [Seq2SeqPreferenceDataConfig, PreferenceDataConfig]][is_pair][is_llm]
        files = {"files": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")}
        self.config = kind(**{"eval_fraction": 0.0, **files, **settings})
        self.rows: TokenizedRows = prepare_rows(self.config, self.model, 400)

    def view(self, row_id: int) -> RowView:
        return view_row(built_in(self.config.objective), self.rows, self.config, self.model, row_id)


def kinds(tokens: list[Token]) -> list[tuple[str, str]]:
    return [(kind, "".join(texts)) for kind, texts in Tokens(tokens).by_kind()]


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_the_tokens_spell_what_they_decode_to(kind):
    tokenizer = EXACT_KINDS[kind]()
    draw = random.Random(1)
    for text in ["a\n👩‍👩‍👧 日本", *(draw_text(draw) for _ in range(30))]:
        ids = tokenizer(text)["input_ids"]
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids)
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        spelt = "".join(texts)
        assert spelt.replace(" ", "") == decoded.replace(" ", ""), text  # some decoders drop a space at the start
        assert spelt.endswith(decoded.removeprefix("<s>")) or "<s>" in text


def test_each_turn_says_why_it_does_not_count_or_what_it_has_lost(tmp_path):
    """Weights of 0, and chats that are whole or cut between turns, are in the golden texts."""
    last, off = say("hello there", "it is four"), "the others are cut off"
    chat = [*last, *say("thanks", "welcome")]
    rows = [
        ({"chosen": last, "rejected": say("hello there", "welcome")}, {}, ["context", "4 tokens count"]),
        (
            {"prompt": chat[:3], "completion": chat[3:]},
            {},
            ["context", "context, as a part of the prompt", "context", "2 tokens count"],
        ),
        ({"messages": last}, {"loss_on": "all"}, ["counts, as data.loss_on is all"] * 2),
        (
            {"messages": chat},
            {"max_length_tokens": 13},
            ["context", f"3 of 4 tokens count, {off}", "context", f"0 of 2 tokens count, {off}"],
        ),
    ]
    for row, settings, expected in rows:
        shown = Rows(tmp_path, [row], True, **settings).view(0)
        assert [turn.split(", ", maxsplit=1)[1] for turn in shown.turns] == expected


def test_an_encoder_decoders_sides_keep_their_end_token_after_a_cut(tmp_path):
    pair = {"source": "hello there thanks welcome", "target": "what is two and two"}
    rows = Rows(tmp_path, [pair], False, prefix="so ", max_source_length_tokens=6, max_target_length_tokens=4)
    source, target = rows.view(0).sides
    assert source.text == "so hello there thanks welcome"
    for side, kind, limit in ((source, CONTEXT, 6), (target, LOSS, 4)):
        (first, kept), (second, lost), (third, end) = kinds(side.tokens)
        assert (first, second, third, end) == (kind, LOST, kind, "</s>")
        assert kept + lost == side.text and side.num_tokens == limit and side.num_lost > 0
    assert list(rows.rows.train[0]["labels"])[-1] == rows.rows.tokenizer.eos_token_id


def test_both_answers_of_a_pair_show_what_each_has_lost(tmp_path):
    pair = {"prompt": "hello there", "chosen": " thanks welcome four", "rejected": " four welcome thanks"}
    full = Rows(tmp_path, [pair], True).view(0).sides[0]
    most = full.num_tokens // 2 - 2
    (side,) = Rows(tmp_path, [pair], True, max_length_tokens=most).view(0).sides
    of_one = [CONTEXT, LOSS, LOST]
    assert [kind for kind, _ in kinds(side.tokens)] == 2 * of_one and side.tokens != full.tokens
    assert (side.num_tokens, side.num_lost, side.limit) == (2 * most, 4, 2 * most)
    (tmp_path / "t5").mkdir()
    of_t5 = Rows(tmp_path / "t5", [pair], False, max_target_length_tokens=3)
    source, target = of_t5.view(0).sides
    assert [kind for kind, _ in kinds(source.tokens)] == [CONTEXT] and source.num_lost == 0
    assert [kind for kind, _ in kinds(target.tokens)] == [LOSS, LOST, LOSS, LOST, LOSS] and target.num_tokens == target.limit == 6
    assert of_t5.view(0).num_label_tokens == count(of_t5.rows.train)["num_label_tokens"] == 6  # not the pair


LENGTHS = [9, 4, 7, 3, 8, 5, 6]


def make_rows(ids: list[list[int]], labels: list[list[int]], num_tokens: list[int], num_labels: list[int]) -> Dataset:
    columns = {"input_ids": ids, "labels": labels, "num_tokens": num_tokens, "num_label_tokens": num_labels}
    return Dataset.from_dict({"row_id": list(range(100, 100 + len(ids))), **columns})


def view(objective: Objective, rows: Dataset, collator, num_processes: int = 1, **settings) -> StepView:
    columns = rows.with_format("numpy")
    train = TrainConfig(global_batch_size_rows=7, micro_batch_size_rows=2, max_steps=1)
    plan = BatchPlan(columns["num_tokens"][:], columns["num_label_tokens"][:], train, num_processes, **settings)
    return view_step(objective, plan, rows, collator, 1)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("pack_length", [None, 12])
@pytest.mark.parametrize("one_row", [False, True])
def test_every_row_is_in_one_pack(num_processes, pack_length, one_row):
    labels = [[-100, *[5] * (n - 2), -100] for n in LENGTHS]
    rows = make_rows([[5] * n for n in LENGTHS], labels, LENGTHS, [n - 2 for n in LENGTHS])
    step = view(Causal(), rows, CausalCollator(0, one_row=one_row), num_processes, pack_length_tokens=pack_length)
    shown = [row for pack in step.packs for row in pack.row_ids]
    assert sorted(shown) == list(range(100, 107)) and sorted(step.plan.step(1).rows) == list(range(7))
    assert step.plan.step(1).num_label_tokens == sum(LENGTHS) - 14
    counted = {kind: sum(num for pack in step.packs for k, num in pack.parts if k == kind) for kind in (LOSS, CONTEXT)}
    assert counted == {kind: step.positions[kind] for kind in (LOSS, CONTEXT)} == {LOSS: sum(LENGTHS) - 14, CONTEXT: 14}
    # The packs of a micro-batch have one width.
    widths: dict[tuple[int, int], set[int]] = {}
    for pack in step.packs:
        widths.setdefault((pack.rank, pack.micro_batch), set()).add(sum(num for _, num in pack.parts))
        assert [pack.parts[begin] for begin in pack.begins] == [(CONTEXT, 1)] * len(pack.row_ids)
        assert pack.padding == {"row": sum(num for kind, num in pack.parts if kind == PADDING)}
    if one_row and pack_length:  # a micro-batch is one row of the tensors, without padding
        assert all("row" in pack.padding and pack.padding["row"] == 0 for pack in step.packs)
        assert step.num_tensor_rows == len(widths) < len(step.packs)
    else:
        assert all(len(of_one) == 1 for of_one in widths.values()) and step.num_tensor_rows == len(step.packs)
    assert all(pack is step.find_pack(row) for pack in step.packs for row in pack.row_ids) and step.find_pack(9) is None
    # A rank without rows gets the step's first one, which is padding.
    num_empty = step.num_micro_batches * num_processes - len(widths)
    drawn = sum(num for pack in step.packs for _, num in pack.parts)
    assert sum(step.positions.values()) == drawn + num_empty * LENGTHS[step.plan.step(1).rows[0]]
    if (num_processes, pack_length) == (3, None):
        assert (num_empty, step.num_micro_batches) == (2, 2), "seven rows, two of a micro-batch on each rank"


PAIRS = list(zip(LENGTHS, reversed(LENGTHS), strict=True))


@pytest.mark.parametrize(
    ("objective", "collator", "answers"),
    [
        (Seq2Seq(), SummarizationCollator(0, 0), [(n,) for n in range(1, 8)]),
        (Seq2SeqPreference(), SourcePairCollator(0, 0), PAIRS),
        (Preference(), PairCollator(0), PAIRS),
    ],
    ids=["seq2seq", "dpo_t5", "dpo"],
)
def test_sources_and_answers_are_padded_each_by_itself_unless_they_are_packed(objective, collator, answers):
    has_source = bool(objective.label_side)
    labels = [[label for n in of_row for label in (6 if has_source else -100, *[6] * (n - 1))] for of_row in answers]
    ids = [[5] * n for n in LENGTHS] if has_source else [[5] * len(row) for row in labels]
    rows = make_rows(ids, labels, [len(row) for row in ids], [1] * 7)
    if answers is PAIRS:
        rows = rows.add_column("num_chosen_tokens", LENGTHS)
    step = view(objective, rows, collator)
    assert len(step.packs) == 7 and step.num_micro_batches == 4
    assert step.positions[LOSS] == sum(label == 6 for row in labels for label in row)
    assert step.positions[CONTEXT] == (sum(LENGTHS) if has_source else 2 * len(PAIRS))
    for _, packs in itertools.groupby(step.packs, key=lambda pack: pack.micro_batch):
        together = [(pack, pack.row_ids[0] - 100) for pack in packs]
        longest_source = max(LENGTHS[place] for _, place in together)
        longest = max(n for _, place in together for n in answers[place])
        for pack, place in together:
            of_answers = sum(longest - n for n in answers[place])
            expected, padding = list[tuple[str, int]](), [of_answers]
            if has_source:
                padding = [longest_source - LENGTHS[place], of_answers]
                expected = [(CONTEXT, LENGTHS[place]), (PADDING, padding[0])]
            for n in answers[place]:
                expected += [(LOSS, n)] if has_source else [(CONTEXT, 1), (LOSS, n - 1)]
                expected += [(PADDING, longest - n)]
            assert pack.parts == [part for part in expected if part[1]] and [*pack.padding.values()] == padding
    if not has_source:
        packed = view(objective, rows, collator, pack_length_tokens=24).packs
        assert any(len(pack.row_ids) > 1 for pack in packed)
        assert all([kind for kind, _ in pack.parts[:4]] == [CONTEXT, LOSS] * 2 for pack in packed)
