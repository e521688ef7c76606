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
from toolkit.tools.preview.row import RowView, Token, Tokens, find_cut_row, token_texts, view_row
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


def uses(row: RowView) -> list[str]:
    """What each turn is for."""
    return [turn.split(", ", maxsplit=1)[1] for turn in row.turns]


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


def test_a_chat_has_its_turns_and_what_was_cut_from_each(tmp_path):
    chat = say("hello there", "it is four", "thanks", "welcome", system="be brief")
    whole = Rows(tmp_path, [{"messages": chat}], True).view(0)
    assert whole.turns == [
        "system: 8 characters, context",
        "user: 11 characters, context",
        "assistant: 10 characters, 4 tokens count",
        "user: 6 characters, context",
        "assistant: 7 characters, 2 tokens count",
    ]
    (side,) = whole.sides
    assert side.num_lost == 0 and side.text.endswith("<|im_start|>assistant\nwelcome<|im_end|>\n")
    assert [text for kind, text in kinds(side.tokens) if kind == LOSS] == ["it is four<|im_end|>", "welcome<|im_end|>"]
    assert "".join(text for _, text in kinds(side.tokens)) == side.text
    # Cut within the first answer.
    limit = side.num_tokens - 14
    cut = Rows(tmp_path, [{"messages": chat}], True, max_length_tokens=limit)
    row = cut.view(0)
    (side,) = row.sides
    off = "the others are cut off"
    assert uses(row)[2::2] == [f"3 of 4 tokens count, {off}", f"0 of 2 tokens count, {off}"]
    assert (side.num_tokens, side.num_lost, side.limit) == (limit, 14, limit)
    assert kinds(side.tokens)[1:] == [
        (LOSS, "it is four"),
        (LOST, "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\nwelcome<|im_end|>\n"),
    ]
    found = find_cut_row(built_in(cut.config.objective), cut.rows, cut.config, cut.model)
    assert found.row_id == 0


def test_turns_that_do_not_count_are_named(tmp_path):
    first, last = say("hello there", "it is four", "thanks", "welcome"), say("hello there", "it is four")
    first[1]["weight"] = 0
    of_prompt = {"prompt": say("hello there", "it is four", "thanks"), "completion": first[3:]}
    pair = {"chosen": last, "rejected": say("hello there", "welcome")}
    rows = [
        (pair, {}, ["context", "4 tokens count"]),
        ({"messages": first}, {}, ["context", "context, as its weight is 0", "context", "2 tokens count"]),
        (of_prompt, {}, ["context", "context, as a part of the prompt", "context", "2 tokens count"]),
        ({"messages": last}, {"loss_on": "all"}, ["counts, as data.loss_on is all"] * 2),
    ]
    for row, settings, expected in rows:
        assert uses(Rows(tmp_path, [row], True, **settings).view(0)) == expected


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


def causal_rows() -> Dataset:
    """Of each row, all but two tokens count."""
    labels = [[-100, *[5] * (n - 2), -100] for n in LENGTHS]
    return make_rows([[5] * n for n in LENGTHS], labels, LENGTHS, [n - 2 for n in LENGTHS])


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
    step = view(Causal(), causal_rows(), CausalCollator(0, one_row=one_row), num_processes, pack_length_tokens=pack_length)
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


def test_a_rank_without_rows_is_padding():
    step = view(Causal(), causal_rows(), CausalCollator(0), 3)
    # Two micro-batches of two rows on three ranks: seven rows leave two ranks without one in the second.
    assert step.num_micro_batches == 2 and len(step.packs) == 7
    drawn = sum(num for pack in step.packs for _, num in pack.parts)
    filler = LENGTHS[step.plan.step(1).rows[0]]
    assert sum(step.positions.values()) == drawn + 2 * filler


def test_an_encoder_decoder_pads_sources_and_targets():
    num_labels = list(range(1, 8))
    num_tokens = [n + more for n, more in zip(LENGTHS, num_labels, strict=True)]
    rows = make_rows([[5] * n for n in LENGTHS], [[6] * n for n in num_labels], num_tokens, num_labels)
    step = view(Seq2Seq(), rows, SummarizationCollator(0, 0))
    assert len(step.packs) == 7 and step.num_micro_batches == 4
    assert step.positions[CONTEXT] == sum(LENGTHS) and step.positions[LOSS] == 28
    for pack in step.packs:
        place = pack.row_ids[0] - 100
        of_source, of_target = pack.padding["source"], pack.padding["target"]
        expected = [(CONTEXT, LENGTHS[place]), (PADDING, of_source), (LOSS, place + 1), (PADDING, of_target)]
        assert pack.parts == [part for part in expected if part[1]]


@pytest.mark.parametrize("of_source", [False, True])
def test_documents_of_a_pair_are_padded_each_by_itself_unless_they_are_packed(of_source):
    answers = [(n, other) for n, other in zip(LENGTHS, LENGTHS[::-1], strict=True)]
    labels = [[6] * n + [6] * other if of_source else [-100, *[6] * (n - 1), -100, *[6] * (other - 1)] for n, other in answers]
    ids = [[5] * (4 if of_source else n + other) for n, other in answers]
    rows = make_rows(ids, labels, [len(row) for row in ids], [1] * 7)
    rows = rows.add_column("num_chosen_tokens", LENGTHS)
    shown = (Seq2SeqPreference(), rows, SourcePairCollator(0, 0)) if of_source else (Preference(), rows, PairCollator(0))
    for _, packs in itertools.groupby(view(*shown).packs, key=lambda pack: pack.micro_batch):
        together = list(packs)
        width = max(n for pack in together for n in answers[pack.row_ids[0] - 100])
        for pack in together:
            expected = [(CONTEXT, 4)] if of_source else []
            for num in answers[pack.row_ids[0] - 100]:
                expected += [(LOSS, num)] if of_source else [(CONTEXT, 1), (LOSS, num - 1)]
                expected += [(PADDING, width - num)] if num < width else []
            assert pack.parts == expected
            assert [*pack.padding.values()][-1] == sum(num for kind, num in expected if kind == PADDING)
    if not of_source:
        packed = view(*shown, pack_length_tokens=24).packs
        assert any(len(pack.row_ids) > 1 for pack in packed)
        assert all([kind for kind, _ in pack.parts[:4]] == [CONTEXT, LOSS] * 2 for pack in packed)
