"""CSV, TSV and text: rows that are empty, quotes of TSV, encodings."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from random import Random

import pytest

from tests.support.refusals import refusal
from tests.support.row_files import list_pairs, load_llm, load_t5
from toolkit.data.sources import files

ARRAY = '[{"source": "Le café", "target": "Der Kaffee"}]'
TABLE = "source\ttarget\nLe café\tDer Kaffee\n"


def test_a_quoted_empty_cell_is_a_row_and_an_empty_line_is_not() -> None:
    Path("rows.csv").write_text('text\none\n""\n\ntwo\n"  "\n  \n\n\nthree\n')
    rows = load_llm("rows.csv")
    assert (rows.train["text"][:], rows.train["row_id"][:]) == (["one", "two", "three"], [0, 2, 5])
    assert rows.remarks == ["skipped 3 of 6 rows of rows.csv with an empty text (first: rows 2, 4, 5)"]


UTF_8_READ_OTHERWISE = "rows.csv is valid UTF-8, but is read as cp1252, with other letters: leave data.encoding out for UTF-8"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_utf_8_that_another_encoding_reads_is_warned_of(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_READ", size)
    table = TABLE.replace("\t", ",")
    for text, written, encoding, warned in (
        (table, "utf-8", "cp1252", [UTF_8_READ_OTHERWISE]),
        (table, "utf-8", "latin-1", [UTF_8_READ_OTHERWISE.replace("cp1252", "iso8859-1")]),
        (table, "cp1252", "cp1252", []),
        (table, "utf-8", "utf-8", []),
        (table, "utf-8", None, []),
        (table, "utf-8-sig", "utf-8-sig", []),
        (table, "utf-16", "utf-16", []),
        (table.replace("é", "e"), "utf-8", "cp1252", []),  # the same in both
        ("id,source,target\n1,a,b\n", "utf-8-sig", "cp1252", [UTF_8_READ_OTHERWISE]),  # the byte order mark would be letters
    ):
        caplog.clear()
        Path("rows.csv").write_bytes(text.encode(written))
        load_t5("rows.csv", encoding=encoding)
        assert caplog.messages == warned, (written, encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-be", "gb18030"])
def test_a_byte_order_mark_is_not_text(encoding: str) -> None:
    for name, text in (("rows.csv", TABLE.replace("\t", ",")), ("rows.tsv", TABLE), ("rows.json", ARRAY)):
        content = ("\ufeff" + text).encode(encoding)
        for path, written in ((name, content), (f"{name}.gz", gzip.compress(content))):
            Path(path).write_bytes(written)
            assert list_pairs(load_t5(path, encoding=encoding)) == [("Le café", "Der Kaffee")]


TSV: list[tuple[str, int | None, list[tuple[str, str]]]] = [
    # Quotes around cells, as Excel and pandas write them.
    ('"a"\tb\n', None, [("a", "b")]),
    ('"a, b"\t"He said ""no"""\n"x"\t"y"\n', None, [("a, b", 'He said "no"'), ("x", "y")]),
    ('"a\tb"\tc\n', None, [("a\tb", "c")]),
    ('a\t"x"\rb\ty\r', None, [("a", "x"), ("b", "y")]),
    # Quotes that are text, as in this line.
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


@pytest.mark.parametrize(("lines", "line", "expected"), TSV)
def test_quotes_of_a_tsv_are_around_cells_or_text(lines: str, line: int | None, expected: list[tuple[str, str]]) -> None:
    Path("rows.tsv").write_bytes(f"source\ttarget\n{lines}".encode())
    rows = load_t5("rows.tsv")
    assert list_pairs(rows) == expected
    how = f"; double quotes are text, as in line {line}" if line else ""
    assert rows.readings == [f"rows.tsv: read as a source with its target, from source and target; no other columns{how}"]


def test_a_tsv_of_one_column_has_a_row_per_line() -> None:
    Path("rows.tsv").write_text('text\none\n"two\nthree"\n"four"\n')
    assert load_llm("rows.tsv").train["text"][:] == ["one", '"two', 'three"', '"four"']
    assert load_llm("rows.tsv", source="csv").train["text"][:] == ["one", "two\nthree", "four"]


def test_a_tsv_with_line_breaks_in_cells_is_refused_by_line() -> None:
    for lines in ('a\t"one\ntwo\nb\tc\n', 'a\t"one\ntwo"\n'):  # the first never closes
        Path("rows.tsv").write_text(f"source\ttarget\n{lines}")
        assert refusal(load_t5, "rows.tsv") == (
            "rows.tsv, line 3: 1 cells where the header has 2 (source, target): no cell may hold tabs or line breaks, because "
            r"double quotes are text here, as in line 2; where they stand around cells, give --data.source csv "
            r"--data.csv_delimiter '\t'"
        )
    assert list_pairs(load_t5("rows.tsv", source="csv", csv_delimiter=r"\t")) == [("a", "one\ntwo")]


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
