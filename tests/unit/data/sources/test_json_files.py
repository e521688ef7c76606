"""JSON lines and arrays: tools that come late, nulls, repeated keys, names of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refusal
from tests.support.row_files import CHAT, load_llm, load_t5, stored_call, with_call, write_objects
from toolkit.data.rows.load import TextRows
from toolkit.errors import UserError

TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one"}]
NULLS = {"x": None, "y": 1, "list": [None, {"z": None}], "deep": {"a": None}}
SCHEMA = [{"name": "f", "parameters": {"properties": {"x": {"enum": ["a", None], "default": None}}}}]


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize(
    ("row", "late"),
    [
        ({"messages": CHAT}, {"tools": [{"name": "add"}]}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"tools": [{"name": "add"}]}),
        ({"conversations": TURNS}, {"tools": [{"name": "add"}]}),
    ],
)
def test_tools_that_come_late_are_read(row: dict[str, Any], late: dict[str, Any], is_array: bool) -> None:
    write_objects("rows.json", [*[row] * 1000, row | late], is_array=is_array)
    rows = load_llm("rows.json")
    assert rows.train["tools"][-1] == '[{"name": "add"}]' and rows.train["tools"][:1000] == [None] * 1000


def test_keys_that_come_late_are_reported() -> None:
    late = {"messages": CHAT, "a\nb\ud800": 1, **{f"id {i:02}": 1 for i in range(30)}}
    write_objects("rows.jsonl", [*({"text": f"t {i}", "id": i} for i in range(1000)), {"text": "late", **late}])
    rows = load_llm("rows.jsonl")
    assert rows.readings == ["rows.jsonl: read as text, from text; not read: id"]
    keys = [r"'a\nb\ud800'", *(f"id {i:02}" for i in range(19))]
    named = ", ".join(f"{key} (row 1,001)" for key in [*keys, "and others"])
    assert rows.remarks == [f"rows.jsonl has keys after its first 1,000 rows that are not read: {named}"]
    assert load_llm("rows.jsonl").remarks == rows.remarks  # from the cache
    write_objects("few.jsonl", [*({"text": f"t {i}"} for i in range(1000)), {"text": "late", "messages": CHAT}])
    assert load_llm("few.jsonl").remarks[0].endswith(" that are not read: messages (row 1,001)")


def test_names_of_columns_can_be_printed_whatever_they_hold() -> None:
    names = ["half \ud83d", "", "\u3000", "two\nlines", "\x1b[31m", "right\u202eleft", "Straße 3"]
    shown = r"'half \ud83d', '', '\u3000', 'two\nlines', '\x1b[31m', 'right\u202eleft', Straße 3"
    write_objects("rows.jsonl", [dict.fromkeys(names, 1) | {"text": "a"}])
    assert load_llm("rows.jsonl").readings == [f"rows.jsonl: read as text, from text; not read: {shown}"]
    write_objects("none.jsonl", [dict.fromkeys(names, 1)])
    for settings in ({}, {"format": "text"}):
        assert f"(its columns: {shown})" in refusal(load_llm, "none.jsonl", **settings)


def test_nulls_in_json_are_the_users_own() -> None:
    def check(rows: TextRows) -> None:
        assert stored_call(rows) == NULLS and json.loads(rows.train["tools"][0]) == SCHEMA

    for is_array in (False, True):
        for messages in (with_call(NULLS), with_call(json.dumps(NULLS)), json.dumps(with_call(NULLS))):
            write_objects("rows.json", [{"messages": messages, "tools": SCHEMA}], is_array=is_array)
            check(load_llm("rows.json"))
    # The keys that a message or a call may lack are still left out.
    call = {"id": None, "function": {"name": "f", "arguments": NULLS, "strict": None}}
    write_objects("rows.json", [{"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}])
    assert json.loads(load_llm("rows.json").train["messages"][0])[1] == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": NULLS}}],
        "content": "",
    }
    function_call = {"from": "function_call", "value": json.dumps({"name": "f", "arguments": NULLS})}
    write_objects("rows.json", [{"conversations": [TURNS[0], function_call]}])
    assert json.loads(load_llm("rows.json").train["messages"][0])[1]["tool_calls"][0]["arguments"] == NULLS
    Path("own.py").write_text(f"def load(config):\n    yield {{'messages': {with_call(NULLS)}, 'tools': {SCHEMA}}}\n")
    check(load_llm(source="own.py:load"))


def test_a_repeated_key_is_refused_by_line() -> None:
    Path("rows.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "c", "target": "d", "source": "e"}\n')
    trouble = "not JSON (the key 'source' stands twice in one object: keep one of them)"
    assert refusal(load_t5, "rows.jsonl").startswith(f"rows.jsonl, line 2: {trouble}")
    Path("rows.json").write_text('[{"source": "a", "target": "b"},\n{"source": "c", "id": {"a": 1, "a": 1}}]')
    assert refusal(load_t5, "rows.json").startswith("rows.json, line 2: not JSON (the key 'a' stands twice")
    write_objects("calls.jsonl", [{"messages": with_call('{"x": 1, "x": 2}')}])
    with pytest.raises(UserError, match="row 1, message 2, arguments of f: not JSON .the key 'x' stands twice in one object"):
        load_llm("calls.jsonl")
