"""Files that are not rows: one sentence for each fault, in each kind of file that can have it."""

import gzip
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.refusals import refusal
from tests.support.row_files import load_t5
from toolkit.data.sources import files


def parquet(columns: dict[str, list]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def arrow(columns: dict[str, list]) -> bytes:
    content, file = pa.table(columns), io.BytesIO()
    with pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content)
    return file.getvalue()


MANY = {"source": [f"text {i}" for i in range(3000)], "target": [f"t {i}" for i in range(3000)]}
PARQUET, ARROW, GZIP = parquet(MANY), arrow(MANY), gzip.compress(b"source,target\n" + b"text,the target\n" * 9)
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
    ("rows.jsonl", "", {}, "rows.jsonl is empty"),
    ("rows.parquet", "", {}, "rows.parquet is empty"),
    ("rows.csv", "source,target\n", {}, "rows.csv holds no rows"),
    ("rows.jsonl", "\n \n", {}, "rows.jsonl holds no rows"),
    ("rows.parquet", parquet({"source": [], "target": []}), {}, "rows.parquet holds no rows"),
    ("rows.csv", "source,target\na,\n ,b\n", {}, "of the 2 rows can be used: skipped 1 of 2 rows of rows.csv with an"),
    # Columns.
    *(
        (name, content, settings, sentence)
        for name, content in {
            "rows.csv": "article,summary\na,b\n",
            "rows.jsonl": '{"article": "a"}\n{"summary": "b"}\n',
            "rows.parquet": parquet({"article": ["a"], "summary": ["b"]}),
        }.items()
        for settings, sentence in (
            ({}, f"{name} has no column 'source' (its columns: article, summary): set data.source_column"),
            ({"source_column": "article"}, f"{name} has no column 'target'"),
        )
    ),
    ("rows.jsonl", '{"source": "a"}\n' * 1001 + "never reached\n", {}, "has no column 'target' (its columns: source)"),
    ("rows.csv", "source,target,source\na,b,c\n", {}, "more than one column 'source'"),
    # Lines of CSV and JSON.
    ("rows.csv", 'source,target\n"two\nlines",b\n\nc,d,e\n', {}, "rows.csv, line 5: 3 cells where the header has 2"),
    ("rows.csv", 'source,target\na,b\nc,"never closed\nd,e\n', {}, "rows.csv: the row that starts on line 3 is not valid CSV"),
    ("rows.csv", 'source,target\n"a "quoted" word",b\n', {}, "double the quotes inside"),
    ("rows.csv", "source,target\na,b\nc,\0d\n", {}, "rows.csv, line 3: a NUL byte"),
    ("rows.jsonl", '{"source": "a" "target": "b"}', {}, "line 1: not JSON (Expecting ',' delimiter: column 16"),
    ("rows.jsonl", '{"source": "a", "target": "b"}\n\n["a", "b"]', {}, "line 3: ['a', 'b'] is not a JSON object: write {"),
    (
        "rows.jsonl",
        '{"source": "a", "target": "b"}\n{"source": "c", "target": "d", "source": "e"}\n',
        {},
        "rows.jsonl, line 2: not JSON (the key 'source' stands twice in one object: keep one of them)",
    ),
    ("rows.jsonl", '{"source": "a", "target": 12}', {}, "row 1, column target: 12 is of type int, not text"),
    ("rows.jsonl", r'{"source": "a\u0000b", "target": "b"}', {}, "row 1, column source: the text holds a NUL character"),
    ("rows.jsonl", r'{"source": "ab\ud83d", "target": "b"}', {}, "character 3 is half a surrogate"),
    ("a.json", '[\n{"source": "a"},\n{"source" "b"}\n]', {}, "a.json, line 3: not JSON (Expecting ':' delimiter)"),
    ("a.json", '[\n{"source": "a"},\n"b"]', {}, "a.json, line 3: 'b' is not a JSON object: write {"),
    ("a.json", '[{"source": "a"}]\n{"source": "b"}', {}, "a.json, line 2: not JSON (text after the end of the array)"),
    ("a.json", '[{"source": "a"},\n{"source": "b', {}, "a.json, line 2: not JSON (Unterminated string starting at)"),
    ("a.json", '[{"source": "a"},\n' + "[" * 100_000, {}, "a.json, line 2: not JSON (maximum recursion depth"),
    ("a.json", '[{"source": "a"},\n{"source": ' + "1" * 5000 + "}]", {}, "a.json, line 2: not JSON (Exceeds the limit"),
    ("a.json", '[{"source": "a"},\n{"id": {"a": 1, "a": 1}}]', {}, "a.json, line 2: not JSON (the key 'a' stands twice"),
    ("a.json", json.dumps([{"source": "a"}]), {"field": "data"}, "a.json is not an object with a list there"),
    # Encodings and delimiters.
    ("rows.csv", "source,target\nc,é".encode()[:-1], {}, "line 2: byte 0xc3 is not valid UTF-8 (unexpected end of data)"),
    ("rows.jsonl", b"caf\xe9,c\n", {}, "rows.jsonl, line 1: byte 0xe9 is not valid UTF-8"),
    ("rows.csv", b"source,target\n" + "é".encode("utf-16"), {"encoding": "ascii"}, "line 2: byte 0xff is not valid ASCII"),
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
    ("rows.parquet", PARQUET, {"source": "jsonl"}, f"rows.parquet{NO_TEXT}"),
    ("rows.csv.gz", GZIP[:-9], {}, "rows.csv.gz is not a complete gzip file ("),
    ("rows.csv.gz", GZIP[:20] + b"\xff\0\xff" + GZIP[23:], {}, "rows.csv.gz is not a complete gzip file ("),
    ("rows.parquet.gz", gzip.compress(PARQUET), {}, f"rows.parquet.gz{INCOMPLETE}"),
    ("rows.arrow.gz", gzip.compress(ARROW), {}, f"rows.arrow.gz{INCOMPLETE}"),
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

    def deny(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(Path()), "open", deny)  # chmod does not stop root
    assert "rows.csv cannot be read (Permission denied)" in refusal(load_t5, "rows.csv")
