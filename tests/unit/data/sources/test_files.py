"""Files of rows by their endings: the same rows from each, quotes, encodings and delimiters, what is skipped and reported."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.support.refusals import refusal
from tests.support.rows import list_pairs, load_llm, load_t5, write_objects
from toolkit.config.validate import FILE_SOURCES
from toolkit.data.sources import files
from toolkit.data.sources.files import READERS

ROWS = [{"source": f"text {i}, the é", "target": f"t {i}"} for i in range(5)]
PAIRS = [(row["source"], row["target"]) for row in ROWS]


def table(delimiter: str) -> str:
    return "".join(f'"{source}"{delimiter}{target}\n' for source, target in [("source", "target"), *PAIRS])


def test_every_ending_and_gzip_give_the_same_rows():
    columns = pa.Table.from_pylist(ROWS)
    pq.write_table(columns, "rows.parquet")
    with pa.ipc.new_file("rows.arrow", columns.schema) as writer:
        writer.write_table(columns, max_chunksize=2)
    with pa.ipc.new_stream("rows.feather", columns.schema) as writer:  # a stream, as `datasets` writes it
        writer.write_table(columns)
    lines, array = "".join(json.dumps(row) + "\n" for row in ROWS), json.dumps(ROWS, indent=2)
    contents = {"a.csv": table(","), "a.tsv": table("\t"), "a.json": array, "a.jsonl": lines, "a.ndjson": lines}
    contents |= {"lines.json": lines, "array.jsonl": array}
    for name, text in contents.items():
        Path(name).write_text(text, encoding="utf-8")
        Path(f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("rows.parquet", "rows.arrow", "rows.feather", *(f"{name}{gz}" for name in contents for gz in ("", ".gz"))):
        assert list_pairs(load_t5(name)) == PAIRS, name
    assert load_t5("a.csv").fingerprint == load_t5("a.csv.gz").fingerprint == load_t5("a.csv", source="csv").fingerprint
    assert len(load_t5("a.csv", "a.json", "rows.arrow").train) == 15
    assert tuple(READERS) == FILE_SOURCES


def test_a_delimiter_an_encoding_and_a_byte_order_mark_of_ones_own():
    array, lines = json.dumps(ROWS), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    marked = {"rows.csv": table(","), "rows.tsv": table("\t"), "rows.json": array, "rows.jsonl": lines}
    for name, text, encoding, settings in (
        ("rows.csv", table(";"), "cp1252", {"csv_delimiter": ";"}),
        ("rows.csv", table("\t"), "utf-16", {"csv_delimiter": r"\t"}),
        ("rows.json", array, "UTF16", {}),
        ("rows.jsonl", lines, "UTF16", {}),
        *(
            (name, "\ufeff" + text, encoding, {})
            for encoding in ("utf-8", "utf-16-le", "utf-32-be", "gb18030")
            for name, text in marked.items()
        ),
    ):
        Path(name).write_text(text, encoding=encoding)
        assert list_pairs(load_t5(name, encoding=encoding, **settings)) == PAIRS, (name, encoding)
    Path("rows.csv").write_text(table(","))
    assert load_t5("rows.csv", encoding="utf8", csv_delimiter=",").fingerprint == load_t5("rows.csv").fingerprint


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_that_looks_like_another_delimiters_gets_a_hint(delimiter):
    shown = delimiter.replace("\t", r"\t")
    for text, settings, hint in (
        (table(delimiter).replace('"', ""), {}, f"between names: set data.csv_delimiter '{shown}'"),
        (table(delimiter) + delimiter * 2, {"csv_delimiter": shown}, "put double quotes around cells that hold"),
        (table(delimiter) + "only one cell", {"csv_delimiter": shown}, "write every cell of the row, an empty one too"),
    ):
        Path("rows.csv").write_text(text)
        assert hint in refusal(load_t5, "rows.csv", **settings)
    Path("other.csv").write_text("a,b\n1,2\n")
    assert "data.csv_delimiter" not in refusal(load_t5, "other.csv")


def test_csv_and_jsonl_read_boms_crlf_quotes_blank_lines_and_absent_keys():
    Path("rows.csv").write_bytes(
        b'\xef\xbb\xbfsource, target ,note\r\n"a, ""b""\r\nsecond line",short,1\r\n\r\n42,caf\xc3\xa9,\r\n'
    )
    rows = load_t5("rows.csv")
    assert list_pairs(rows) == [('a, "b"\r\nsecond line', "short"), ("42", "café")]
    assert rows.train["lead_text"][:] == rows.train["prompt"][:] and rows.train["row_id"][:] == [0, 1]
    assert (rows.remarks, len(rows.evaluation)) == ([], 0)
    Path("rows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"target": "no source"}\r\n\r\n{"source": "a\\nb \xc3\xa9", "target": "t", "more": [1]}\r\n'
    )
    rows = load_t5("rows.jsonl")
    assert list_pairs(rows) == [("a\nb é", "t")]
    assert rows.remarks == ["skipped 1 of 2 rows of rows.jsonl with an empty source (row 1)"]


def test_several_files_and_patterns_are_read_in_order_each_file_once():
    for name in ("b2", "b1", "a"):
        Path(f"{name}.csv").write_text(f"source,target\n{name},{name}\n")
    rows = load_t5("b?.csv", "a.csv", "b1.csv")
    assert (rows.train["prompt"][:], rows.train["row_id"][:]) == (["b1", "b2", "a"], [0, 1, 2])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_empty_cells_are_counted_skipped_and_reported(kind):
    cells = [("a", "x"), ("b", ""), (" \t", "y"), ("c", "  "), ("d", "z"), ("", ""), ("e", None)]
    Path("rows.csv").write_text("source,target\n" + "".join(f"{source},{target or ''}\n" for source, target in cells))
    objects = [{"source": source, "target": target} for source, target in cells]
    write_objects("rows.jsonl", objects)
    Dataset.from_list(objects).to_parquet("rows.parquet")
    rows = load_t5(f"rows.{kind}")
    assert (list_pairs(rows), rows.train["row_id"][:]) == ([("a", "x"), ("d", "z")], [0, 4])
    assert rows.remarks == [
        f"skipped 3 of 7 rows of rows.{kind} with an empty target (first: rows 2, 4, 7)",
        f"skipped 2 of 7 rows of rows.{kind} with an empty source (first: rows 3, 6)",
    ]


@pytest.mark.parametrize(("ending", "tab"), [("csv", ","), ("tsv", "\t")])
def test_missing_cells_are_skipped_and_counted(ending, tab):
    cells = ["b", "NaN", "N/A", " None ", "null", "None of these", "nan", "Nanna", "NA", "<NA>", "NATO"]
    Path(f"rows.{ending}").write_text(f"source{tab}target\n" + "".join(f"a{tab}{cell}\n" for cell in cells))
    rows = load_t5(f"rows.{ending}")
    assert [target for _, target in list_pairs(rows)] == ["b", "None of these", "Nanna", "NATO"]
    assert rows.remarks[0] == f"skipped 7 of 11 rows of rows.{ending} with a missing target (NA, NaN, None) (first: rows 2, 3, 4)"


def test_a_text_is_rows_of_paragraphs():
    Path("a.txt").write_bytes("\ufeffone\r\ntwo é\r\n\r\n \t\r\nthree\n\n\n  four\nfive".encode())
    Path("b.txt.gz").write_bytes(gzip.compress(b"\nsix\n"))
    rows = load_llm("a.txt", "b.txt.gz")
    assert rows.train["text"][:] == ["one\ntwo é", "three", "  four\nfive", "six"]
    how = "read as text, from text; no other columns; a row is a paragraph between blank lines"
    assert rows.readings[0] == f"a.txt and 1 more: {how}"
    Path("blank.txt").write_text("\n \n")
    assert "blank.txt holds no rows" in refusal(load_llm, "blank.txt")


def test_a_quoted_empty_cell_is_a_row_and_an_empty_line_is_not():
    Path("rows.csv").write_text('text\none\n""\n\ntwo\n"  "\n  \n\n\nthree\n')
    rows = load_llm("rows.csv")
    assert (rows.train["text"][:], rows.train["row_id"][:]) == (["one", "two", "three"], [0, 2, 5])
    assert rows.remarks == ["skipped 3 of 6 rows of rows.csv with an empty text (first: rows 2, 4, 5)"]


UTF_8_READ_OTHERWISE = "rows.csv is valid UTF-8, but is read as cp1252, with other letters: leave data.encoding out for UTF-8"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_utf_8_that_another_encoding_reads_is_warned_of(size, monkeypatch, caplog):
    monkeypatch.setattr(files, "_BYTES_PER_READ", size)
    content = table(",")
    for text, written, encoding, warned in (
        (content, "utf-8", "cp1252", [UTF_8_READ_OTHERWISE]),
        (content, "utf-8", "latin-1", [UTF_8_READ_OTHERWISE.replace("cp1252", "iso8859-1")]),
        (content, "cp1252", "cp1252", []),
        (content, "utf-8", "utf-8", []),
        (content, "utf-8", None, []),
        (content, "utf-8-sig", "utf-8-sig", []),
        (content, "utf-16", "utf-16", []),
        (content.replace("é", "e"), "utf-8", "cp1252", []),  # the same in both
        ("id,source,target\n1,a,b\n", "utf-8-sig", "cp1252", [UTF_8_READ_OTHERWISE]),  # the byte order mark would be letters
    ):
        caplog.clear()
        Path("rows.csv").write_bytes(text.encode(written))
        load_t5("rows.csv", encoding=encoding)
        assert caplog.messages == warned, (written, encoding)


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
def test_quotes_of_a_tsv_are_around_cells_or_text(lines, line, expected):
    Path("rows.tsv").write_bytes(f"source\ttarget\n{lines}".encode())
    rows = load_t5("rows.tsv")
    assert list_pairs(rows) == expected
    how = f"; double quotes are text, as in line {line}" if line else ""
    assert rows.readings == [f"rows.tsv: read as a source with its target, from source and target; no other columns{how}"]


def test_a_tsv_of_one_column_has_a_row_per_line():
    Path("rows.tsv").write_text('text\none\n"two\nthree"\n"four"\n')
    assert load_llm("rows.tsv").train["text"][:] == ["one", '"two', 'three"', '"four"']
    assert load_llm("rows.tsv", source="csv").train["text"][:] == ["one", "two\nthree", "four"]


def test_a_tsv_with_line_breaks_in_cells_is_refused_by_line():
    for lines in ('a\t"one\ntwo\nb\tc\n', 'a\t"one\ntwo"\n'):  # the first never closes
        Path("rows.tsv").write_text(f"source\ttarget\n{lines}")
        assert refusal(load_t5, "rows.tsv") == (
            "rows.tsv, line 3: 1 cells where the header has 2 (source, target): no cell may hold tabs or line breaks, because "
            r"double quotes are text here, as in line 2; where they stand around cells, give --data.source csv "
            r"--data.csv_delimiter '\t'"
        )
    assert list_pairs(load_t5("rows.tsv", source="csv", csv_delimiter=r"\t")) == [("a", "one\ntwo")]
