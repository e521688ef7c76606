"""Rows of a causal model from file to tokens: masks, cuts, sources, the cache and what a resume compares."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.chats import CHATML, CLOSING, LLAMA2, MARKED, STRIPPING, build_chat_tokenizer, say
from tests.support.refusals import refusal
from tests.support.rows import write_objects
from tests.support.template_shapes import MISTRAL
from toolkit.config.data import MixEntry
from toolkit.config.schema import ModelConfig
from toolkit.data.rows.example import Example
from toolkit.data.tokens import prepare as preparing
from toolkit.data.tokens.prompts import prepare_chat
from toolkit.errors import UserError

CHATS = [say("hello there", "it is four", "thanks", "welcome", system="be brief"), say("what is two", "two is it")]


@pytest.fixture(scope="module")
def chatml():
    return build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)


@pytest.fixture
def prepare(prepare, chatml):
    return lambda rows=None, *, model=chatml, **settings: prepare(model, rows, **settings)


def chats(*conversations, **columns):
    return [{"messages": messages, **columns} for messages in conversations]


def counted(rows, place=0):
    """The text of the tokens that count, one string for each run of them."""
    row = rows.train[place]
    runs: list[list[int]] = [[]]
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [rows.tokenizer.decode(run) for run in runs if run]


def prompt_of(rows, place=0):
    row = rows.train[place]
    return row["input_ids"][: row["prompt_length"]]


def test_keys_of_messages_that_the_template_does_not_name_are_reported(prepare):
    messages = [message | {"loss weight": 1, "id": i, "tool_call_id": "a"} for i, message in enumerate(CHATS[0])]
    remark = "keys of messages that the chat template does not name, so the model does not see them: 'loss weight' (5 messages), "
    assert prepare(chats(messages, CHATS[1])).remarks == [remark + "'id' (5 messages)"]
    many = [message | {f"key {i}": 1 for i in range(9)} for message in CHATS[0]]
    assert prepare(chats(many)).remarks[0].endswith(", 'key 4' (5 messages) and 4 more")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_assistants_turns_count_with_their_end_token_or_all_tokens_if_asked_for(prepare, template):
    rows = prepare(chats(*CHATS), chat_template=template)
    columns = {"row_id", "input_ids", "labels", "num_tokens", "num_label_tokens", "target_bytes", "target", "lead_text"}
    assert set(rows.train.features) == set(rows.evaluation.features) == columns | {"prompt_length", "source_index"}
    for row in rows.train:
        assert row["num_tokens"] == len(row["input_ids"]) == len(row["labels"])
        assert row["num_label_tokens"] == sum(label != -100 for label in row["labels"])
    assert [counted(rows, place) for place in (0, 1)] == [["it is four<|im_end|>", "welcome<|im_end|>"], ["two is it<|im_end|>"]]
    assert rows.train["target"][:] == ["welcome", "two is it"]
    assert rows.train["lead_text"][:] == ["thanks", "what is two"]
    assert rows.train["target_bytes"][:] == [len("it is fourwelcome"), len("two is it")]
    assert (rows.train["row_id"][:], len(rows.evaluation), rows.remarks) == ([0, 1], 0, [])
    row = prepare(chats(CHATS[0]), chat_template=template, loss_on="all").train[0]
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert (row["target"], row["prompt_length"]) == ("welcome", rows.train["prompt_length"][0])
    text = "system\nbe brief\nuser\nhello there\nassistant\nit is four\nuser\nthanks\nassistant\nwelcome\n"
    assert row["target_bytes"] == len(text)


@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA2])
def test_a_turn_of_weight_0_does_not_count_and_is_not_generated(prepare, tmp_path, template):
    first, last, plain = (say("hello there", "it is four", "thanks", "welcome") for _ in range(3))
    first[1]["weight"], last[3]["weight"] = 0, 0
    rows, whole = (prepare(chats(*some), chat_template=template) for some in ((first, last), (plain, plain)))
    assert rows.train["input_ids"][:] == whole.train["input_ids"][:]
    said = [run.replace("<|im_end|>", "").replace("</s>", "").strip() for place in (0, 1) for run in counted(rows, place)]
    assert said == rows.train["target"][:] == ["welcome", "it is four"]
    assert rows.train["lead_text"][:] == ["thanks", "hello there"]
    assert prompt_of(rows, 1) == rows.tokenizer.apply_chat_template(last[:1], add_generation_prompt=True, return_dict=False)
    assert refusal(prepare, chats(CHATS[1], first), loss_on="all") == (
        f"{tmp_path / 'rows.jsonl'}, row 2: message 2 has weight 0, but data.loss_on all counts every token: set it to "
        "completions, or leave the weight out"
    )


def test_a_template_that_gives_no_masks_is_refused_with_the_way_out(prepare, tmp_path):
    thinking = say("hello", "<think>so two</think>it is", "thanks", "<think>b</think>four")
    sentence = refusal(prepare, chats(CHATS[1], thinking), chat_template=STRIPPING)
    assert sentence.startswith(
        f"{tmp_path / 'rows.jsonl'}, row 2: the chat template does not show which tokens are the assistant"
    )
    for remedy in ("{% generation %}", "recipes/chat_templates/chatml_generation.jinja", "data.loss_on all", "earlier thinking"):
        assert remedy in sentence
    pair, tokenizer = Example(messages=thinking, rejected=thinking), build_chat_tokenizer(template=STRIPPING)
    assert "data.loss_on" not in refusal(prepare_chat, tokenizer, pair, "completions", "x")  # pairs have no such setting
    rows = prepare(chats(CHATS[1], thinking), chat_template=STRIPPING, loss_on="all")
    assert rows.train["prompt_length"][1] == 0 and rows.train["target"][1] == ""
    assert rows.train[1]["labels"][1:] == rows.train[1]["input_ids"][1:]
    assert f"training rows: thinking (first: {tmp_path / 'rows.jsonl'}, row 2); set data.chat_template" in rows.remarks[0]


def test_context_that_the_template_leaves_out_is_counted_by_split_and_kind(prepare, tmp_path):
    write_objects(tmp_path / "held_out.jsonl", chats(say("other", "welcome", system="be brief")))
    rows = [*chats(CHATS[1]), *chats(CHATS[0], CHATS[1], tools=[{"name": "add"}])]
    remarks = prepare(rows, chat_template=MISTRAL, eval_files=str(tmp_path / "held_out.jsonl")).remarks
    assert [remark.replace(f"{tmp_path}/", "") for remark in remarks if "leaves out" in remark] == [
        f"WARNING: the chat template leaves out context in {what}); set data.chat_template to a template that prints it"
        for what in (
            "2 of 3 training rows: tools (first: rows.jsonl, row 2",
            "1 of 3 training rows: system turn (first: rows.jsonl, row 2",
            "1 of 1 evaluation rows: system turn (first: held_out.jsonl, row 1",
        )
    ]


def test_a_prompt_is_followed_by_its_completion_and_the_end_token(prepare):
    rows = prepare([{"prompt": "what is ", "completion": "two \n"}, {"prompt": "hello", "completion": " there"}])
    assert [counted(rows, 0), counted(rows, 1)] == [["two \n</s>"], [" there</s>"]]
    assert prompt_of(rows, 0) == rows.tokenizer("what is ")["input_ids"]
    assert rows.train["target"][:] == ["two", "there"] and rows.train["target_bytes"][:] == [5, 6]
    assert rows.train["lead_text"][:] == ["what is ", "hello"]
    everything = prepare([{"prompt": "what is ", "completion": "é"}], loss_on="all").train[0]
    assert (everything["num_label_tokens"], everything["target_bytes"]) == (everything["num_tokens"] - 1, 6)
    assert everything["input_ids"][0] == rows.tokenizer.convert_tokens_to_ids("what")  # no label, so no bytes either


def test_a_cut_ends_a_row_and_its_target(prepare):
    messages = say("hello there", "it is four", "thanks", "welcome back", system="be brief")
    whole = prepare(chats(messages)).train[0]
    limit = whole["prompt_length"] + 1
    cut = prepare(chats(messages), max_length_tokens=limit)
    row = cut.train[0]
    assert (row["input_ids"], row["labels"]) == (whole["input_ids"][:limit], whole["labels"][:limit])
    assert row["prompt_length"] == limit - 1 and row["target"] == counted(cut)[1] and row["target"] == "welcome"
    assert row["target_bytes"] == len("it is four" + row["target"])
    # The last turn is cut off: the one before is what is generated.
    earlier = prepare(chats(messages), max_length_tokens=limit - 1)
    assert counted(earlier) == ["it is four<|im_end|>"]
    assert (earlier.train[0]["target"], earlier.train[0]["lead_text"]) == ("it is four", "hello there")
    assert earlier.tokenizer.decode(prompt_of(earlier)).endswith("hello there<|im_end|>\n<|im_start|>assistant\n")


def test_chats_that_lose_their_completion_are_left_out_and_counted(prepare, tmp_path):
    long = chats(say("hello there " * 50, "it is four"))
    write_objects(tmp_path / "held_out.jsonl", long)
    rows = prepare([*chats(*CHATS), *long], max_length_tokens=80, eval_files=str(tmp_path / "held_out.jsonl"))
    assert (rows.train["row_id"][:], len(rows.evaluation)) == ([1, 2], 0)
    assert rows.remarks[-1] == "no held-out row is left to evaluate on"
    rows = prepare([*chats(*CHATS), *long], max_length_tokens=80)
    assert rows.train["row_id"][:] == [0, 1]
    assert rows.remarks[0].startswith("WARNING: cut 1 of 3 training rows to data.max_length_tokens = 80: ")
    assert rows.remarks[1:] == [
        "1 of 3 conversations lost their whole completion to data.max_length_tokens = 80 and were left out (training rows)"
    ]
    assert "all 1 training conversations lost their whole completion" in refusal(prepare, long, max_length_tokens=80)


def test_an_entry_of_a_mix_without_training_rows_is_refused(prepare, tmp_path):
    write_objects(tmp_path / "short.jsonl", [{"text": "hello there"}])
    write_objects(tmp_path / "long.jsonl", [{"prompt": "hello there " * 50, "completion": "it is four"}])
    mix = [MixEntry(source="jsonl", files=str(tmp_path / f"{name}.jsonl")) for name in ("short", "long")]
    for _ in range(2):  # nothing half done is cached
        assert refusal(prepare, mix=mix, max_length_tokens=80).startswith(
            "data.mix[1] (jsonl) has no training row left (all its rows are held out, skipped or cut off): "
        )
    assert prepare(mix=mix).train["source_index"][:] == [0, 1]
    assert refusal(prepare, mix=mix, eval_files=str(tmp_path / "short.jsonl")).startswith("data.mix[0] (jsonl) has no training")


@pytest.mark.parametrize("template", [CHATML, CLOSING, MARKED.replace("+ '<|im_end|>' }}", "+ '<|im_end|>\\n' }}")])
@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_what_ends_a_turn_stops_generation(prepare, template, loss_on):
    from tokenizers import AddedToken

    tokenizer = build_chat_tokenizer()
    # Special as Llama 3's <|eot_id|> is: in no list of named special tokens.
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")], special_tokens=True)
    for _ in range(2):  # built, and from the cache
        rows = prepare(chats(*CHATS), model=tokenizer, chat_template=template, loss_on=loss_on)
        assert "<|im_end|>" not in rows.tokenizer.all_special_tokens
        assert set(rows.tokenizer.convert_ids_to_tokens(rows.stop_token_ids)) == {"<|im_end|>", "</s>"}
    text = prepare([{"text": "hello <|im_end|>"}, {"text": "hello"}], model=tokenizer)
    assert text.stop_token_ids == (rows.tokenizer.eos_token_id,)


def test_a_mix_is_one_dataset_with_the_entry_of_each_row(prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_objects("a.jsonl", [{"text": f"hello {i}"} for i in range(5)])
    Path("b.csv").write_text("prompt,completion\n" + "".join(f"what {i},it is {i}\n" for i in range(5)))
    write_objects("c.jsonl", [{"text": "user"}, {"text": ""}])
    Path("held_out.csv").write_text("text\nhello 1\nnew\n")
    mix = [MixEntry(source="jsonl", files=["a.jsonl", "c.jsonl"]), MixEntry(source="csv", files="b.csv", weight=2.0)]
    rows = prepare(mix=mix)
    assert rows.train["source_index"][:] == [0] * 6 + [1] * 5
    assert rows.train["row_id"][:] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert rows.remarks == ["skipped 1 of 2 rows of c.jsonl with an empty text (row 2)"]
    assert rows.sets == ((5, "jsonl"), (2, "jsonl"), (5, "csv"))
    assert prepare(mix=mix, num_rows=3).train["source_index"][:] == [0] * 3 + [1] * 3
    assert prepare(mix=mix, num_rows=6).train["source_index"][:] == [0] * 6 + [1] * 5
    named = prepare(mix=[replace(mix[0], name="news"), mix[1]], eval_files={"mail": "held_out.csv"})
    assert named.sets[0] == (2, "mail")
    held_out = prepare(mix=mix, eval_files="held_out.csv")
    assert named.fingerprint == held_out.fingerprint, "a run may be resumed with names"
    assert (len(held_out.evaluation), len(held_out.train), held_out.evaluation["source_index"][:]) == (2, 10, [0, 0])
    assert held_out.remarks[0] == "skipped 1 of 5 rows of a.jsonl that equal a row of data.eval_files (row 2)"
    mix[1] = MixEntry(source="csv", files="nowhere.csv")
    assert refusal(prepare, mix=mix).startswith("data.mix[1].files: there is no file")


def test_tokenizers_that_cannot_do_it_are_refused(prepare, tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    slow, endless = ModelConfig(name_or_path=str(tmp_path / "slow")), build_chat_tokenizer()
    (tmp_path / "slow" / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "slow" / "vocab.txt").write_text("")  # what tells that the folder has a tokenizer
    assert "is a slow one (ByT5Tokenizer) without offsets" in refusal(prepare, [{"text": "a"}], model=slow)
    endless.eos_token = None
    assert "has no end token to put after texts: set eos_token" in refusal(prepare, [{"text": "a"}], model=endless)


def test_the_fingerprint_is_of_template_mask_and_length(prepare, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(LLAMA2)
    settings = [{}, {"chat_template": LLAMA2}, {"loss_on": "all"}, {"max_length_tokens": 25}, {"num_rows": 1}]
    prints = [prepare(chats(*CHATS), **changes).fingerprint for changes in settings]
    assert len(set(prints)) == len(settings)
    assert prepare(chats(*CHATS), chat_template=str(path)).fingerprint == prints[1]
    assert prepare(chats(*CHATS), chat_template=CHATML).fingerprint == prints[0]  # the tokenizer's own
    # It is that of the tokens, not of what they were made from.
    assert prepare(chats(*CHATS), max_length_tokens=999).fingerprint == prints[0]
    assert prepare(chats(CHATS[0], CHATS[1], [])).fingerprint == prints[0]
    # Nor is it that of the batch plan.
    assert prepare(chats(*CHATS), packing=False, num_loader_workers=3).fingerprint == prints[0]


def test_a_folder_without_tokenizer_gets_one_trained_on_the_training_rows(prepare, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    model = ModelConfig(name_or_path=str(tmp_path / "config"), from_scratch=True)
    rows = prepare(chats(*[say("shibboleth", "shibboleth", system="shibboleth")] * 3), model=model, chat_template=CHATML)
    assert "shibboleth" in rows.tokenizer.get_vocab() and rows.tokenizer.chat_template == CHATML
    # Its only special tokens are its own: what ends a turn is plain text to it.
    assert counted(rows)[0].startswith("shibboleth<|im_end|>")
    assert "the turns of 3 of 3 training rows with no special token, so generation has nothing to stop at" in rows.remarks[-1]


def test_a_process_that_tokenizes_tells_a_users_mistake(prepare, monkeypatch):
    monkeypatch.setattr(preparing, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    with pytest.raises(UserError, match=r"rows.jsonl, row 2: the chat template refuses this conversation \(Conversation roles"):
        prepare(chats(CHATS[1], [*say("a"), *say("b", "c")]), chat_template=LLAMA2, num_tokenizer_workers=2)
