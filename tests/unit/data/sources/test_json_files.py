"""Objects in JSON lines, in arrays and in columnar files: tools that come late, nulls, names of columns. Files that are not
rows: one sentence for each fault, in each kind of file that can have it."""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.support.refusals import refusal
from tests.support.rows import CHAT, TURNS, list_pairs, load_llm, load_t5, stored_call, with_call, write_objects
from toolkit.data.sources import files

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


@pytest.mark.parametrize("messages", [with_call(NULLS), with_call(json.dumps(NULLS)), json.dumps(with_call(NULLS))])
def test_nulls_in_json_are_the_users_own(messages):
    row = {"messages": messages, "tools": SCHEMA}
    write_objects("lines.json", [row])
    write_objects("array.json", [row], is_array=True)
    Path("own.py").write_text(f"def load(config):\n    yield {row}\n")
    for rows in (load_llm("lines.json"), load_llm("array.json"), load_llm(source="own.py:load")):
        assert stored_call(rows) == NULLS and json.loads(rows.train["tools"][0]) == SCHEMA


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


MANY = pa.table({"source": [f"text {i}" for i in range(3000)], "target": [f"t {i}" for i in range(3000)]})
PARQUET_FILE, ARROW_FILE = io.BytesIO(), io.BytesIO()
pq.write_table(MANY, PARQUET_FILE)
with pa.ipc.new_file(ARROW_FILE, MANY.schema) as writer:
    writer.write_table(MANY)
PARQUET, ARROW = PARQUET_FILE.getvalue(), ARROW_FILE.getvalue()
GZIP = gzip.compress(b"source,target\n" + b"text,the target\n" * 9)
INCOMPLETE = " is not a complete parquet or Arrow file ("
NO_TEXT = (
    " is not text, but an archive, an Excel workbook, or a parquet or Arrow file: unpack it, save it as CSV, or leave "
    "data.source out, so that its ending says how it is read"
)
# From Python 3.13 on, the decoder says which byte.
NO_BOM = " is not valid UTF-16 (UTF-16 stream does not start with BOM)"
if sys.version_info >= (3, 13):
    NO_BOM = ", line 1: byte 0x73 is not valid UTF-16 (Stream does not start with BOM)"

REFUSED = [
    # No rows, or none that can be used.
    ("rows.csv", "", {}, "rows.csv is empty"),
    ("rows.csv", "source,target\n", {}, "rows.csv holds no rows"),
    ("rows.jsonl", "\n \n", {}, "rows.jsonl holds no rows"),
    ("rows.csv", "source,target\na,\n ,b\n", {}, "of the 2 rows can be used: skipped 1 of 2 rows of rows.csv with an"),
    # Columns.
    ("rows.jsonl", '{"a": "a"}\n{"b": "b"}\n', {}, "rows.jsonl has no column 'source' (its columns: a, b): set data.source_c"),
    ("rows.csv", "a,b\nx,y\n", {"source_column": "a"}, "has no column 'target' (its columns: a, b): set data.source_c"),
    ("rows.jsonl", '{"source": "a"}\n' * 1001 + "never reached\n", {}, "has no column 'target' (its columns: source)"),
    ("rows.csv", "source,target,source\na,b,c\n", {}, "more than one column 'source'"),
    # Lines of CSV and JSON.
    ("rows.csv", 'source,target\n"two\nlines",b\n\nc,d,e\n', {}, "rows.csv, line 5: 3 cells where the header has 2"),
    ("rows.csv", 'source,target\na,b\nc,"never closed\nd,e\n', {}, "rows.csv: the row that starts on line 3 is not valid CSV"),
    ("rows.csv", "source,target\na,b\nc,\0d\n", {}, "rows.csv, line 3: a NUL byte"),
    ("rows.jsonl", '{"source": "a" "target": "b"}', {}, "line 1: not JSON (Expecting ',' delimiter: column 16"),
    ("rows.jsonl", '{"source": "a", "target": "b"}\n\n["a", "b"]', {}, "line 3: ['a', 'b'] is not a JSON object: write {"),
    (
        "rows.jsonl",
        '{"source": "a", "target": "b"}\n{"source": "c", "target": "d", "source": "e"}\n',
        {},
        "rows.jsonl, line 2: not JSON (the key 'source' stands twice in one object: keep one of them)",
    ),
    ("rows.jsonl", r'{"source": "ab\ud83d", "target": "b"}', {}, "character 3 is half a surrogate"),
    ("a.json", '[\n{"source": "a"},\n{"source" "b"}\n]', {}, "a.json, line 3: not JSON (Expecting ':' delimiter)"),
    ("a.json", '[\n{"source": "a"},\n"b"]', {}, "a.json, line 3: 'b' is not a JSON object: write {"),
    ("a.json", '[{"source": "a"}]\n{"source": "b"}', {}, "a.json, line 2: not JSON (text after the end of the array)"),
    ("a.json", '[{"source": "a"},\n' + "[" * 100_000, {}, "a.json, line 2: not JSON (maximum recursion depth"),
    ("a.json", '[{"source": "a"},\n{"id": {"a": 1, "a": 1}}]', {}, "a.json, line 2: not JSON (the key 'a' stands twice"),
    ("a.json", json.dumps([{"source": "a"}]), {"field": "data"}, "a.json is not an object with a list there"),
    # Encodings and delimiters.
    ("rows.csv", "source,target\nc,é".encode()[:-1], {}, "line 2: byte 0xc3 is not valid UTF-8 (unexpected end of data)"),
    ("rows.csv", b"source,target\n", {"encoding": "utf-16"}, f"rows.csv{NO_BOM}"),
    ("rows.csv", b"", {"encoding": "latin-9000"}, "data.encoding is 'latin-9000', which Python does not know: give a name"),
    ("rows.csv", b"", {"encoding": "idna"}, "data.encoding is 'idna', which Python does not know"),
    ("rows.csv", b"", {"csv_delimiter": "::"}, "data.csv_delimiter is '::': give one character"),
    (
        "rows.csv",
        b"source\ttarget\na\tb\n",
        {"csv_delimiter": ";", "source": "tsv"},
        "data.csv_delimiter is ';', but no file is read as csv: leave it out",
    ),
    (
        "rows.csv",
        "source,target\nÁ,b\n",
        {"encoding": "cp1252"},
        "rows.csv, line 2: byte 0x81 is not valid CP1252 (character maps to <undefined>): set data.encoding (cp1252 for files of "
        "Western Windows, utf-16, none for UTF-8), or convert the file",
    ),
    # Not the kind of file that the name says.
    ("rows.dat", "a", {}, "data.files: rows.dat has an unknown file ending: let its name end in one of .csv, .tsv"),
    ("rows.zip", b"PK\x03\x04\x14\0", {"source": "jsonl"}, f"rows.zip{NO_TEXT}"),
    ("rows.csv.gz", GZIP[:-9], {}, "rows.csv.gz is not a complete gzip file ("),
    ("rows.csv.gz", GZIP[:20] + b"\xff\0\xff" + GZIP[23:], {}, "rows.csv.gz is not a complete gzip file ("),
    ("rows.parquet.gz", gzip.compress(PARQUET), {}, f"rows.parquet.gz{INCOMPLETE}"),
    ("rows.arrow", ARROW[:-30], {}, f"rows.arrow{INCOMPLETE}"),
    ("rows.arrow", "no arrow at all", {}, f"rows.arrow{INCOMPLETE}"),
    ("rows.parquet", PARQUET[: len(PARQUET) // 2], {}, f"rows.parquet{INCOMPLETE}"),
    # Its footer is whole, its first column is not.
    ("rows.parquet", PARQUET[:8] + b"\xff" * 5000 + PARQUET[5008:], {}, f"rows.parquet{INCOMPLETE}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "settings", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_is_not_rows_is_one_sentence(name, content, settings, sentence):
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert sentence in refusal(load_t5, name, **settings)


@pytest.mark.parametrize("num_bytes", [1, 15, 20])
def test_a_wrong_byte_is_found_where_a_read_ends_inside_a_good_character(num_bytes, monkeypatch):
    Path("rows.csv").write_bytes("source,target\né,b\n".encode() + b"caf\xe9,c\n")
    monkeypatch.setattr(files, "_BYTES_PER_READ", num_bytes)
    assert refusal(load_t5, "rows.csv").startswith("rows.csv, line 3: byte 0xe9 is not valid UTF-8")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train_row.csv", "data.files: there is no file train_row.csv: did you mean train_rows.csv?"),
        ("nowhere/rows.csv", "the folder nowhere does not exist"),
        ("zzz.csv", "nothing in . has a name like it"),
        ("*.tsv", "no file matches *.tsv"),
        ("~nobody-of-this-name/a.csv", "data.files: '~nobody-of-this-name/a.csv' cannot be read ("),
        ("a" * 300 + ".csv", "data.files: 'aaa"),
    ],
)
def test_a_name_of_no_file_is_one_sentence(name, sentence):
    Path("train_rows.csv").write_text("source,target\na,b\n")
    assert sentence in refusal(load_t5, name)


def test_a_file_that_may_not_be_read_is_one_sentence(monkeypatch):
    Path("rows.csv").write_text("source,target\na,b\n")
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))  # chmod does not stop root
    assert "rows.csv cannot be read (Permission denied)" in refusal(load_t5, "rows.csv")
