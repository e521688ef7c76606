"""CSV, TSV and text: rows that are empty, quotes of TSV, encodings."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.row_files import list_pairs, load_llm, load_t5
from toolkit.data.sources import files
from toolkit.errors import UserError

ARRAY = '[{"source": "Le café", "target": "Der Kaffee"}]'
TABLE = "source\ttarget\nLe café\tDer Kaffee\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(name: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_t5(name, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_quoted_empty_cell_is_a_row_and_an_empty_line_is_not() -> None:
    Path("rows.csv").write_text('text\none\n""\n\ntwo\n"  "\n  \n\n\nthree\n')
    rows = load_llm("rows.csv")
    assert (rows.train["text"][:], rows.train["row_id"][:]) == (["one", "two", "three"], [0, 2, 5])
    assert rows.remarks == ["skipped 3 of 6 rows of rows.csv with an empty text (first: rows 2, 4, 5)"]
    Path("two.csv").write_text('source,target\na,b\n\n  \n"",""\nc,d\n')
    assert [row["row_id"] for row in load_t5("two.csv").train] == [0, 2]


UTF_8_READ_OTHERWISE = "rows.csv is valid UTF-8, but is read as cp1252, with other letters: leave data.encoding out for UTF-8"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_utf_8_that_another_encoding_reads_is_warned_of(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_READ", size)
    for written, encoding, warned in (
        ("utf-8", "cp1252", [UTF_8_READ_OTHERWISE]),
        ("utf-8", "latin-1", [UTF_8_READ_OTHERWISE.replace("cp1252", "iso8859-1")]),
        ("cp1252", "cp1252", []),
        ("utf-8", "utf-8", []),
        ("utf-8", None, []),
        ("utf-8-sig", "utf-8-sig", []),
        ("utf-16", "utf-16", []),
    ):
        caplog.clear()
        Path("rows.csv").write_bytes(TABLE.replace("\t", ",").encode(written))
        load_t5("rows.csv", encoding=encoding)
        assert caplog.messages == warned, (written, encoding)
    Path("rows.csv").write_bytes(TABLE.replace("\t", ",").replace("é", "e").encode())  # the same in both
    load_t5("rows.csv", encoding="cp1252")
    assert caplog.messages == []
    Path("rows.csv").write_bytes("id,source,target\n1,a,b\n".encode("utf-8-sig"))  # the byte order mark would be letters
    load_t5("rows.csv", encoding="cp1252")
    assert caplog.messages == [UTF_8_READ_OTHERWISE]
    Path("rows.csv").write_bytes("source,target\nÁ,b\n".encode())
    assert refusal("rows.csv", encoding="cp1252").startswith("rows.csv, line 2: byte 0x81 is not valid CP1252")
    way_out = ": set data.encoding (cp1252 for files of Western Windows, utf-16, none for UTF-8), or convert the file"
    assert refusal("rows.csv", encoding="cp1252").endswith(way_out)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-be", "gb18030"])
def test_a_byte_order_mark_is_not_text(encoding: str) -> None:
    for name, text in (("rows.csv", TABLE.replace("\t", ",")), ("rows.tsv", TABLE), ("rows.json", ARRAY)):
        Path(name).write_bytes(("\ufeff" + text).encode(encoding))
        assert list_pairs(load_t5(name, encoding=encoding)) == [("Le café", "Der Kaffee")]
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
        assert list_pairs(load_t5(f"{name}.gz", encoding=encoding)) == [("Le café", "Der Kaffee")]


QUOTES_AROUND_CELLS = [
    ('"a"\tb\n', [("a", "b")]),
    ('"a, b"\t"He said ""no"""\n"x"\t"y"\n', [("a, b", 'He said "no"'), ("x", "y")]),
    ('"a\tb"\tc\n', [("a\tb", "c")]),
    ('a\t"x"\rb\ty\r', [("a", "x"), ("b", "y")]),
]
QUOTES_ARE_TEXT = [
    ('a\t"hello\nb\tc\n', 2, [("a", '"hello'), ("b", "c")]),
    ('a\t"b" c\n', 2, [("a", '"b" c')]),
    ('a\t6" pipe\n"b"\tc\n', 2, [("a", '6" pipe'), ('"b"', "c")]),
    ('"b"\tc\n6" pipe\td\n', 3, [('"b"', "c"), ('6" pipe', "d")]),
    ('a\t "b"\n', 2, [("a", ' "b"')]),
    ('a\t"""\nb\tc\n', 2, [("a", '"""'), ("b", "c")]),
    # Each line is a row by itself, although a cell might go on from the first to the last.
    ('x\ty\na\t"He left.\nb\tc\nd\tShe left."\n', 3, [("x", "y"), ("a", '"He left.'), ("b", "c"), ("d", 'She left."')]),
    ('a\t"He left.\n\nd\tShe left."\n', 2, [("a", '"He left.'), ("d", 'She left."')]),
    ('a\t"He left.\nShe\t"left\n', 2, [("a", '"He left.'), ("She", '"left')]),
    ('a\t"\nb\tc\n\td\ne\t"\n', 2, [("a", '"'), ("b", "c"), ("e", '"')]),
]


@pytest.mark.parametrize(("lines", "expected"), QUOTES_AROUND_CELLS)
def test_a_tsv_as_excel_and_pandas_write_it(lines: str, expected: list[tuple[str, str]]) -> None:
    Path("rows.tsv").write_bytes(f"source\ttarget\n{lines}".encode())
    rows = load_t5("rows.tsv")
    assert list_pairs(rows) == expected
    assert rows.readings == ["rows.tsv: read as a source with its target, from source and target; no other columns"]


@pytest.mark.parametrize(("lines", "line", "expected"), QUOTES_ARE_TEXT)
def test_a_tsv_in_which_quotes_are_text(lines: str, line: int, expected: list[tuple[str, str]]) -> None:
    Path("rows.tsv").write_text(f"source\ttarget\n{lines}")
    rows = load_t5("rows.tsv")
    assert list_pairs(rows) == expected
    assert rows.readings[0].endswith(f"; no other columns; double quotes are text, as in line {line}")


def test_a_tsv_of_one_column_has_a_row_per_line() -> None:
    Path("rows.tsv").write_text('text\none\n"two\nthree"\n"four"\n')
    assert load_llm("rows.tsv").train["text"][:] == ["one", '"two', 'three"', '"four"']
    assert load_llm("rows.tsv", source="csv").train["text"][:] == ["one", "two\nthree", "four"]


def test_a_tsv_with_line_breaks_in_cells_is_refused_by_line() -> None:
    Path("rows.tsv").write_text('source\ttarget\na\t"one\ntwo"\n')
    assert refusal("rows.tsv") == (
        "rows.tsv, line 3: 1 cells where the header has 2 (source, target): no cell may hold tabs or line breaks, because double "
        r"quotes are text here, as in line 2; where they stand around cells, give --data.source csv --data.csv_delimiter '\t'"
    )
    assert list_pairs(load_t5("rows.tsv", source="csv", csv_delimiter=r"\t")) == [("a", "one\ntwo")]
    Path("rows.tsv").write_text('source\ttarget\na\t"one\ntwo\nb\tc\n')  # never closes
    assert "line 3: 1 cells where" in refusal("rows.tsv")


@pytest.mark.parametrize("seed", range(3))
def test_what_the_csv_module_writes_comes_back_and_no_line_is_swallowed(seed: int) -> None:
    random = Random(seed)
    texts = ["".join(random.choices('ab"\t ', k=random.randint(1, 5))) + "." for _ in range(40)]
    rows = list(zip(texts[::2], texts[1::2], strict=True))
    with Path("rows.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("source", "target"), *rows])
    assert list_pairs(load_t5("rows.tsv")) == rows
    plain = [tuple(text.replace("\t", " ") for text in row) for row in rows]
    Path("rows.tsv").write_text("source\ttarget\n" + "".join(f"{source}\t{target}\n" for source, target in plain))
    assert list_pairs(load_t5("rows.tsv")) == plain
