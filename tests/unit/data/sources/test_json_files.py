"""Objects in JSON lines, in arrays and in columnar files: tools that come late, nulls, names of columns."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from tests.support.refusals import refusal
from tests.support.row_files import CHAT, TURNS, list_pairs, load_llm, load_t5, stored_call, with_call, write_objects
from toolkit.data.rows.load import TextRows

NULLS = {"x": None, "y": 1, "list": [None, {"z": None}], "deep": {"a": None}}
SCHEMA = [{"name": "f", "parameters": {"properties": {"x": {"enum": ["a", None], "default": None}}}}]


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"conversations": TURNS}])
def test_tools_that_come_late_are_read(row, is_array):
    write_objects("rows.json", [*[row] * 1000, row | {"tools": [{"name": "add"}]}], is_array=is_array)
    assert load_llm("rows.json").train["tools"][:] == [None] * 1000 + ['[{"name": "add"}]']


def test_keys_that_come_late_are_reported():
    late = {"messages": CHAT, "a\nb\ud800": 1, **{f"id {i:02}": 1 for i in range(30)}}
    write_objects("rows.jsonl", [*({"text": f"t {i}", "id": i} for i in range(1000)), {"text": "late", **late}])
    rows = load_llm("rows.jsonl")
    assert rows.readings == ["rows.jsonl: read as text, from text; not read: id"]
    keys = [r"'a\nb\ud800'", *(f"id {i:02}" for i in range(19))]
    named = ", ".join(f"{key} (row 1,001)" for key in [*keys, "and others"])
    assert rows.remarks == [f"rows.jsonl has keys after its first 1,000 rows that are not read: {named}"]
    assert load_llm("rows.jsonl").remarks == rows.remarks  # from the cache


def test_names_of_columns_can_be_printed_whatever_they_hold():
    names = ["half \ud83d", "", "\u3000", "two\nlines", "\x1b[31m", "right\u202eleft", "Straße 3"]
    shown = r"'half \ud83d', '', '\u3000', 'two\nlines', '\x1b[31m', 'right\u202eleft', Straße 3"
    write_objects("rows.jsonl", [dict.fromkeys(names, 1) | {"text": "a"}])
    assert load_llm("rows.jsonl").readings == [f"rows.jsonl: read as text, from text; not read: {shown}"]
    write_objects("none.jsonl", [dict.fromkeys(names, 1)])
    assert f"(its columns: {shown})" in refusal(load_llm, "none.jsonl")


def test_nulls_in_json_are_the_users_own():
    def check(rows: TextRows) -> None:
        assert stored_call(rows) == NULLS and json.loads(rows.train["tools"][0]) == SCHEMA

    for is_array in (False, True):
        for messages in (with_call(NULLS), with_call(json.dumps(NULLS)), json.dumps(with_call(NULLS))):
            write_objects("rows.json", [{"messages": messages, "tools": SCHEMA}], is_array=is_array)
            check(load_llm("rows.json"))
    # The keys that a message or a call may lack are left out.
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


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ([{"x": "a", "list": [None, "b"]}, {"y": 1}], {}),  # structs get null keys
        ([NULLS, {"y": "text", "list": 3}], {"on_mixed_types": "use_json"}),  # JSON text
    ],
)
def test_objects_of_columnar_files_have_the_keys_that_they_were_written_with(arguments, how):
    rows = [{"messages": with_call(each)} for each in arguments]
    dataset = Dataset.from_list(rows, **how)
    if not how:
        assert dataset[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["y"] is None
    dataset.to_parquet("rows.parquet")
    dataset.save_to_disk("saved")
    shutil.copy(next(Path("saved").glob("*.arrow")), "rows.arrow")
    Path("folder").mkdir()
    shutil.copy("rows.parquet", "folder/train.parquet")
    Path("lines").mkdir()
    write_objects("lines/train.jsonl", rows)
    Path("own.py").write_text("from datasets import Dataset\ndef load(config): return Dataset.from_parquet('rows.parquet')\n")
    for settings in (
        *({"files": f"rows.{ending}"} for ending in ("parquet", "arrow")),
        *({"source": source} for source in ("./folder", "./lines", "own.py:load")),
    ):
        loaded = load_llm(**settings)
        assert [stored_call(loaded, place) for place in (0, 1)] == arguments, settings


ROWS = [{"prompt": f"{number}", "completion": " a"} for number in range(12)]
PANDAS = {
    "columns": {column: {str(number): row[column] for number, row in enumerate(ROWS)} for column in ROWS[0]},
    "index": {str(number): row for number, row in enumerate(ROWS)},
    "split": {"columns": ["prompt", "completion"], "index": [*range(12)], "data": [[*row.values()] for row in ROWS]},
    "list": {column: [row[column] for row in ROWS] for column in ROWS[0]},
    "columns by words": {column: {row["prompt"] + "th": row[column] for row in ROWS} for column in ROWS[0]},
    "index by words": {row["prompt"] + "th": row for row in ROWS},
    "table": {"schema": {"fields": [{"name": "prompt", "type": "string"}]}, "data": ROWS},
}
"""What `DataFrame.to_json` and `to_dict` write, by `orient`."""


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "whole",
    [*PANDAS.values(), {"version": "1.0", "data": ROWS}, {"rows": ROWS, "errors": []}, {"v": {"v": 1}, "x": {"data": ROWS}}],
)
def test_an_object_that_holds_all_rows_is_read(whole, indent):
    Path("rows.json").write_text(json.dumps(whole, indent=indent))
    assert list_pairs(load_llm("rows.json")) == [(row["prompt"], " a") for row in ROWS]


def test_the_rows_of_an_object_are_named_where_several_may_be_meant():
    both = {"train": ROWS, "test": ROWS[:2]}
    with gzip.open("both.json.gz", "wt") as file:
        json.dump(both, file)
    remedy = "; if the lists under {} are the rows, set data.field to one of them"
    assert refusal(load_llm, "both.json.gz").endswith(remedy.format("train and test"))
    rows = load_llm("both.json.gz", field="test")
    assert len(rows.train) == 2 and rows.readings[0].endswith("; no other columns; its rows are under test")
    assert rows.fingerprint != load_llm("both.json.gz", field="train").fingerprint
    assert refusal(load_llm, "both.json.gz", field="dev") == (
        "data.field is dev, but both.json.gz is not an object with a list there: correct it, or leave it out"
    )
    # In lines they are named, but not guessed: each may be a row with a list. Arrays in lines can only be rows.
    write_objects("lines.jsonl", [{"x": {"data": ROWS[:5]}}, {"x": {"data": ROWS[5:]}}])
    assert refusal(load_llm, "lines.jsonl").endswith(remedy.format("x.data"))
    Path("arrays.jsonl").write_text(f"{json.dumps(ROWS[:5])}\n{json.dumps(ROWS[5:])}\n")
    for rows in (load_llm("lines.jsonl", field="x.data"), load_llm("arrays.jsonl")):
        assert len(rows.train) == len(ROWS)
    # One row stays one, whatever lists it has, in one line or several.
    for indent in (None, 1):
        Path("chat.json").write_text(json.dumps({"messages": CHAT, "tools": SCHEMA}, indent=indent))
        assert len(load_llm("chat.json").train) == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_column_may_stand_inside_another(ending):
    rows = [{"id": 1, "translation": {"en": f"Say {number}", "fr": {"text": f"Dis {number}"}}} for number in range(2)]
    rows = [{"id": 1, "translation": None}, *rows, {"id": 1, "translation": {"en": "Say", "fr": None}}]
    write_objects("rows.jsonl", rows)
    Dataset.from_list(rows).to_parquet("rows.parquet")
    settings = {"source_column": "translation.en", "target_column": "translation.fr.text"}
    loaded = load_t5(f"rows.{ending}", **settings)
    assert list_pairs(loaded) == [("Say 0", "Dis 0"), ("Say 1", "Dis 1")]
    assert loaded.readings == [
        f"rows.{ending}: read as a source with its target, from translation.en and translation.fr.text; not read: id"
    ]
    assert refusal(load_t5, f"rows.{ending}") == (
        f"rows.{ending} has no column 'source' (its columns: id, translation, translation.en, translation.fr, "
        "translation.fr.text): set data.source_column and data.target_column to columns that exist"
    )
    Path("own.py").write_text(f"def load(config):\n    yield from {rows[1:3]}\n")
    assert list_pairs(load_t5(source="own.py:load", **settings)) == list_pairs(loaded)
    # Each name may have a dot of its own.
    rows = [{"a.b": {"c.d": "Say"}, "a": {"e": "Dis"}}]
    write_objects("rows.jsonl", rows)
    Dataset.from_list(rows).to_parquet("rows.parquet")
    assert list_pairs(load_t5(f"rows.{ending}", source_column="a.b.c.d", target_column="a.e")) == [("Say", "Dis")]
