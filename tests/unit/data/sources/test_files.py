"""Files of rows by their endings: the same rows from each, encodings and delimiters, what is skipped and reported."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refusal
from tests.support.row_files import list_pairs, load_llm, load_t5, write_objects
from toolkit.config.validate import FILE_SOURCES
from toolkit.data.sources.files import READERS

ROWS = [{"source": f"text {i}, the é", "target": f"t {i}"} for i in range(5)]
PAIRS = [(row["source"], row["target"]) for row in ROWS]


def table(delimiter: str) -> str:
    return "".join(f'"{source}"{delimiter}{target}\n' for source, target in [("source", "target"), *PAIRS])


def write_all() -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
    return ["rows.parquet", "rows.arrow", "rows.feather", *(f"{name}{gz}" for name in contents for gz in ("", ".gz"))]


def test_every_ending_and_gzip_give_the_same_rows() -> None:
    for name in write_all():
        assert list_pairs(load_t5(name)) == PAIRS, name
    assert load_t5("a.csv").fingerprint == load_t5("a.csv.gz").fingerprint == load_t5("a.csv", source="csv").fingerprint
    assert len(load_t5("a.csv", "a.json", "rows.arrow").train) == 15
    assert tuple(READERS) == FILE_SOURCES


def test_a_delimiter_and_an_encoding_of_ones_own() -> None:
    array, lines = json.dumps(ROWS), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    for name, text, encoding, settings in (
        ("rows.csv", table(";"), "cp1252", {"csv_delimiter": ";"}),
        ("rows.csv", table("\t"), "utf-16", {"csv_delimiter": r"\t"}),
        ("rows.json", array, "UTF16", {}),
        ("rows.jsonl", lines, "UTF16", {}),
    ):
        Path(name).write_text(text, encoding=encoding)
        assert list_pairs(load_t5(name, encoding=encoding, **settings)) == PAIRS
    Path("rows.csv").write_text(table(","))
    assert load_t5("rows.csv", encoding="utf8", csv_delimiter=",").fingerprint == load_t5("rows.csv").fingerprint


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_that_looks_like_another_delimiters_gets_a_hint(delimiter: str) -> None:
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


def test_csv_and_jsonl_read_boms_crlf_quotes_blank_lines_and_absent_keys() -> None:
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


def test_several_files_and_patterns_are_read_in_order_each_file_once() -> None:
    for name in ("b2", "b1", "a"):
        Path(f"{name}.csv").write_text(f"source,target\n{name},{name}\n")
    rows = load_t5("b?.csv", "a.csv", "b1.csv")
    assert (rows.train["prompt"][:], rows.train["row_id"][:]) == (["b1", "b2", "a"], [0, 1, 2])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_empty_cells_are_counted_skipped_and_reported(kind: str) -> None:
    from datasets import Dataset

    cells: list[tuple[str, Any]] = [("a", "x"), ("b", ""), (" \t", "y"), ("c", "  "), ("d", "z"), ("", ""), ("e", None)]
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
def test_missing_cells_are_skipped_and_counted(ending: str, tab: str) -> None:
    cells = ["b", "NaN", "N/A", " None ", "null", "None of these", "nan", "Nanna", "NA", "<NA>", "NATO"]
    Path(f"rows.{ending}").write_text(f"source{tab}target\n" + "".join(f"a{tab}{cell}\n" for cell in cells))
    rows = load_t5(f"rows.{ending}")
    assert [target for _, target in list_pairs(rows)] == ["b", "None of these", "Nanna", "NATO"]
    assert rows.remarks[0] == f"skipped 7 of 11 rows of rows.{ending} with a missing target (NA, NaN, None) (first: rows 2, 3, 4)"


def test_a_text_is_rows_of_paragraphs() -> None:
    Path("a.txt").write_bytes("\ufeffone\r\ntwo é\r\n\r\n \t\r\nthree\n\n\n  four\nfive".encode())
    Path("b.txt.gz").write_bytes(gzip.compress(b"\nsix\n"))
    rows = load_llm("a.txt", "b.txt.gz")
    assert rows.train["text"][:] == ["one\ntwo é", "three", "  four\nfive", "six"]
    assert (
        rows.readings[0]
        == "a.txt and 1 more: read as text, from text; no other columns; a row is a paragraph between blank lines"
    )
    Path("blank.txt").write_text("\n \n")
    assert "blank.txt holds no rows" in refusal(load_llm, "blank.txt")
