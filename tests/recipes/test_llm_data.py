"""Forms of rows through the LLM recipe on 2 ranks: chats with tools, a mix of files with prompts and of plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_resume import rows_by_step
from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.workbench import Workbench
from toolkit.files.json_lines import load_json_lines

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 400, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
NO_TEXTS = {"eval__generate": False}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": {"type": "object"}}}]
CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}


def make_chats(num_chats: int) -> list[dict[str, Any]]:
    """With a system turn, tools, a call of one and its answer, or without any of these."""
    rows: list[dict[str, Any]] = []
    for i in range(num_chats):
        plain = say(f"hello there {i:b}", "it is four", "thanks", "welcome " * (1 + i % 4) + "there")
        calling = [
            *say(f"what is two and two {i:b}", system="be brief"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": f"it is {i:b}"},
        ]
        rows.append({"messages": calling, "tools": TOOLS} if i % 2 else {"messages": plain, "tools": None})
    return rows


def said(messages: list[dict[str, Any]]) -> list[str]:
    """What the assistant writes in each of its turns, as the template prints it."""
    call = f"<tool_call>add {json.dumps(CALL['function']['arguments'])}</tool_call>"
    return [m["content"] + (call if "tool_calls" in m else "") + "<|im_end|>" for m in messages if m["role"] == "assistant"]


def test_chats_with_tools_and_system_turns(llm_workbench: Workbench, tmp_path: Path) -> None:
    """Two answers hold Chinese, and characters at which `str.splitlines()` splits, raw in the files."""
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "chat.jinja").write_text(CHATML)
    rows, held_out = make_chats(24), make_chats(40)[36:]
    for some_rows in (rows, held_out):
        some_rows[1]["messages"][-1]["content"] += "\u2028it is\x85\u2029\x0c四"
    printed = llm_workbench.run(
        "chats",
        model=model,
        model__from_scratch=True,
        data__files=save_jsonl(tmp_path / "chats.jsonl", [*rows, {"messages": [], "tools": None}]),
        data__eval_files=save_jsonl(tmp_path / "held_out.jsonl", held_out),
        data__chat_template=tmp_path / "chat.jinja",
        data__max_length_tokens=400,
        eval__num_rows=None,
        log_row_ids=True,
    )
    assert "cut " not in printed and "left out" not in printed
    assert f"skipped 1 of 25 rows of {tmp_path}/chats.jsonl with an empty chat (row 25)" in printed
    lines = llm_workbench.lines("chats", "train")
    num_label_tokens = [sum(len(tokenizer(text).input_ids) for text in said(row["messages"])) for row in rows]
    first_row = len(held_out)  # evaluation files come first
    expected = {
        step: sum(num_label_tokens[row - first_row] for row in row_ids)
        for step, row_ids in rows_by_step(llm_workbench.runs / "chats").items()
    }
    assert {line["step"]: line["num_label_tokens"] for line in lines} == expected
    assert "ROUGE counts words of any script" in printed
    assert [line["rouge_tokenizer"] for line in llm_workbench.lines("chats", "eval")] == ["unicode"]
    predictions = load_json_lines(llm_workbench.runs / "chats" / "predictions-3.jsonl")
    assert [line["reference"] for line in predictions] == [row["messages"][-1]["content"] for row in held_out]
    exported = AutoTokenizer.from_pretrained(llm_workbench.runs / "chats" / "export")
    assert exported.apply_chat_template(say("thanks"), tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_mix_reports_the_loss_of_each_source_beside_the_whole(llm_workbench: Workbench, tmp_path: Path) -> None:
    """Rows are held out by a hash of their text, so a file alone holds out the rows that it does in a mix."""
    pairs = [{"prompt": row["source"], "completion": " " + row["target"]} for row in make_rows(40)]
    texts = [{"text": row["source"]} for row in make_rows(30, seed=1)]
    files = [save_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in (("pairs", pairs), ("texts", texts))]
    changes = {"train__max_steps": 0, "eval__num_rows": None, "data__eval_fraction": 0.3, **NO_TEXTS}
    llm_workbench.run_all({file.stem: {"data__files": file} | changes for file in files}, preset="single")
    alone = [figures for file in files for figures in llm_workbench.lines(file.stem, "eval")]
    mix = [{"source": "jsonl", "files": str(file)} for file in files]
    of_mix = {"data__source": None, "data__files": None, "data__mix": mix, **changes}
    printed = llm_workbench.run("mix", eval__batch_size_rows=3, **of_mix)
    (line,) = llm_workbench.lines("mix", "eval")
    assert line["num_rows"] == sum(figures["num_rows"] for figures in alone) > 15
    assert [line["mix[0]/loss"], line["mix[1]/loss"]] == pytest.approx([figures["loss"] for figures in alone], rel=1e-6)
    assert f"({alone[0]['num_rows']} of mix[0], {alone[1]['num_rows']} of mix[1]), " in printed
    assert f"mix[1]/loss {alone[1]['loss']:.4g}" in printed
    assert line["loss"] != pytest.approx(sum(figures["loss"] for figures in alone) / 2, rel=1e-5), "it is weighted by tokens"

    held_out = save_jsonl(tmp_path / "held_out.jsonl", [{"text": row["source"]} for row in make_rows(9, seed=2)])
    llm_workbench.run("files", preset="single", data__eval_files=held_out, **of_mix)
    (line,) = llm_workbench.lines("files", "eval")
    assert not [name for name in line if name.endswith("/loss")], "the rows of data.eval_files are of no entry"
