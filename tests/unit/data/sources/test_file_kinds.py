"""Kinds of files by their endings, JSON arrays, delimiters, encodings, gzip, missing cells; and what is wrong with each."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.validate import FILE_SOURCES
from toolkit.data.rows.load import TextRows, load_rows
from toolkit.data.sources.files import READERS
from toolkit.errors import UserError

ROWS = [{"source": f"text {i}, the é", "target": f"t {i}"} for i in range(5)]
ARRAY = json.dumps(ROWS, indent=2)
# From Python 3.13 on, the decoder says which byte.
NO_BOM = " is not valid UTF-16 (UTF-16 stream does not start with BOM)"
if sys.version_info >= (3, 13):
    NO_BOM = ", line 1: byte 0x73 is not valid UTF-16 (Stream does not start with BOM)"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def t5(*files: str, **settings: Any) -> TextRows:
    return load_rows(DataConfig(**{"files": list(files), "eval_fraction": 0.0, "cache_dir": "cache", **settings}))


def texts(*files: str, **settings: Any) -> list[str]:
    return load_rows(LLMDataConfig(files=list(files), eval_fraction=0.0, cache_dir="cache", **settings)).train["text"][:]


def pairs(rows: TextRows) -> list[dict[str, str]]:
    return [{"source": row["prompt"], "target": row["completion"]} for row in rows.train]


def refusal(*files: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        t5(*files, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(delimiter: str) -> str:
    return "".join(f'"{row["source"]}"{delimiter}{row["target"]}\n' for row in [{"source": "source", "target": "target"}, *ROWS])


def write_all() -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.Table.from_pylist(ROWS)
    pq.write_table(columns, "rows.parquet")
    with pa.ipc.new_file("rows.arrow", columns.schema) as writer:
        writer.write_table(columns, max_chunksize=2)
    with pa.ipc.new_stream("rows.feather", columns.schema) as writer:  # a stream, as `datasets` writes it
        writer.write_table(columns)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    contents = {"csv": table(","), "tsv": table("\t"), "json": ARRAY, "jsonl": lines, "ndjson": lines}
    for ending, text in contents.items():
        Path(f"rows.{ending}").write_text(text, encoding="utf-8")
        Path(f"rows.{ending}.gz").write_bytes(gzip.compress(text.encode()))
    return ["rows.parquet", "rows.arrow", "rows.feather", *(f"rows.{e}{gz}" for e in contents for gz in ("", ".gz"))]


def test_every_ending_and_gzip_give_the_same_rows() -> None:
    for name in write_all():
        assert pairs(t5(name)) == ROWS, name
    assert t5("rows.csv").fingerprint == t5("rows.csv.gz").fingerprint == t5("rows.csv", source="csv").fingerprint
    assert len(t5("rows.csv", "rows.json", "rows.arrow").train) == 15
    Path("lines.json").write_text(Path("rows.jsonl").read_text())
    Path("array.jsonl").write_text(ARRAY)
    assert pairs(t5("lines.json")) == pairs(t5("array.jsonl")) == ROWS
    assert tuple(READERS) == FILE_SOURCES


def test_an_unknown_ending_is_refused() -> None:
    Path("rows.dat").write_text("a")
    assert refusal("rows.dat").startswith(
        "data.files: rows.dat has an unknown file ending: let its name end in one of .csv, .tsv"
    )
    assert refusal("~nobody-of-this-name/a.csv").startswith("data.files: '~nobody-of-this-name/a.csv' cannot be read (")
    assert refusal("a" * 300 + ".csv").startswith("data.files: 'aaa")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[\n{"source": "a"},\n{"source" "b"}\n]', "rows.json, line 3: not JSON (Expecting ':' delimiter): write one object per"),
        ('[\n{"source": "a"},\n"b"]', "rows.json, line 3: 'b' is not a JSON object: write {"),
        ('[{"source": "a"}]\n{"source": "b"}', "rows.json, line 2: not JSON (text after the end of the array)"),
        ('[{"source": "a"},\n{"source": "b', "rows.json, line 2: not JSON (Unterminated string starting at)"),
        ('[{"source": "a"},\n' + "[" * 100_000, "rows.json, line 2: not JSON (maximum recursion depth"),
        ('[{"source": "a"},\n{"source": ' + "1" * 5000 + "}]", "rows.json, line 2: not JSON (Exceeds the limit"),
    ],
)
def test_a_broken_array_is_refused_by_line(text: str, sentence: str) -> None:
    Path("rows.json").write_text(text)
    assert refusal("rows.json").startswith(sentence)


def test_a_delimiter_and_an_encoding_of_ones_own() -> None:
    Path("rows.csv").write_text(table(";"), encoding="cp1252")
    rows = t5("rows.csv", csv_delimiter=";", encoding="cp1252")
    assert pairs(rows) == ROWS
    Path("utf16.csv").write_text(table("\t"), encoding="utf-16")
    assert pairs(t5("utf16.csv", csv_delimiter=r"\t", encoding="utf-16")) == ROWS
    for name, text in (("rows.json", ARRAY), ("rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))):
        Path(name).write_text(text, encoding="utf-16")
        assert pairs(t5(name, encoding="UTF16")) == ROWS
    Path("rows.csv").write_text(table(","))
    assert t5("rows.csv", encoding="utf8", csv_delimiter=",").fingerprint == t5("rows.csv").fingerprint


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_that_looks_like_another_delimiters_gets_a_hint(delimiter: str) -> None:
    Path("rows.csv").write_text(table(delimiter).replace('"', ""))
    shown = delimiter.replace("\t", r"\t")
    assert refusal("rows.csv").endswith(f"between names: set data.csv_delimiter '{shown}'")
    Path("wide.csv").write_text(table(delimiter) + delimiter * 2)
    assert "put double quotes around cells that hold" in refusal("wide.csv", csv_delimiter=shown)
    Path("narrow.csv").write_text(table(delimiter) + "only one cell")
    assert refusal("narrow.csv", csv_delimiter=shown).endswith("write every cell of the row, an empty one too")
    Path("other.csv").write_text("a,b\n1,2\n")
    assert "data.csv_delimiter" not in refusal("other.csv")


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        ("é".encode("cp1252"), {}, "rows.csv, line 2: byte 0xe9 is not valid UTF-8 (unexpected end of data): set data.encoding"),
        ("é".encode("utf-16"), {"encoding": "ascii"}, "rows.csv, line 2: byte 0xff is not valid ASCII"),
        (b"", {"encoding": "utf-16"}, f"rows.csv{NO_BOM}"),
        (b"", {"encoding": "latin-9000"}, "data.encoding is 'latin-9000', which Python does not know: give a name such as"),
        (b"", {"encoding": "idna"}, "data.encoding is 'idna', which Python does not know"),
        (b"", {"csv_delimiter": "::"}, "data.csv_delimiter is '::': give one character"),
        (b"", {"csv_delimiter": ";", "source": "tsv"}, "data.csv_delimiter is ';', but no file is read as csv: leave it out"),
    ],
)
def test_a_wrong_encoding_or_delimiter_is_one_sentence(content: bytes, settings: dict[str, Any], sentence: str) -> None:
    Path("rows.csv").write_bytes(b"source,target\n" + content if settings.get("source") != "tsv" else b"source\ttarget\na\tb\n")
    assert refusal("rows.csv", **settings).startswith(sentence)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_missing_cells_are_skipped_and_counted(ending: str) -> None:
    cells = ["b", "NaN", "N/A", " None ", "null", "None of these", "nan", "Nanna", "NA", "<NA>", "NATO"]
    tab = "\t" if ending == "tsv" else ","
    Path(f"rows.{ending}").write_text(f"source{tab}target\n" + "".join(f"a{tab}{cell}\n" for cell in cells))
    rows = t5(f"rows.{ending}")
    assert [row["target"] for row in pairs(rows)] == ["b", "None of these", "Nanna", "NATO"]
    assert rows.remarks[0] == (
        f"skipped 7 of 11 rows of rows.{ending} with a missing target (NA, NaN, None) (first: rows 2, 3, 4)"
    )


def test_a_text_is_rows_of_paragraphs() -> None:
    Path("a.txt").write_bytes("\ufeffone\r\ntwo é\r\n\r\n \t\r\nthree\n\n\n  four\nfive".encode())
    Path("b.txt.gz").write_bytes(gzip.compress(b"\nsix\n"))
    assert texts("a.txt", "b.txt.gz") == ["one\ntwo é", "three", "  four\nfive", "six"]
    config = LLMDataConfig(files="a.txt", eval_fraction=0.0, cache_dir="cache")
    assert load_rows(config).readings == [
        "a.txt: read as text, from text; no other columns; a row is a paragraph between blank lines"
    ]
    Path("blank.txt").write_text("\n \n")
    with pytest.raises(UserError, match="blank.txt holds no rows"):
        texts("blank.txt")


def test_files_that_are_no_text_are_named_for_what_they_are() -> None:
    write_all()
    Path("rows.zip").write_bytes(b"PK\x03\x04\x14\0")
    for name in ("rows.zip", "rows.parquet"):
        assert refusal(name, source="jsonl") == (
            f"{name} is not text, but an archive, an Excel workbook, or a parquet or Arrow file: unpack it, save it as CSV, or "
            "leave data.source out, so that its ending says how it is read"
        )
    whole = Path("rows.csv.gz").read_bytes()
    Path("cut.csv.gz").write_bytes(whole[:-9])
    assert refusal("cut.csv.gz").startswith("cut.csv.gz is not a complete gzip file (")
    Path("bad.csv.gz").write_bytes(whole[:20] + b"\xff\0\xff" + whole[23:])
    assert refusal("bad.csv.gz").startswith("bad.csv.gz is not a complete gzip file (")
    for kind in ("parquet", "arrow"):
        Path(f"packed.{kind}.gz").write_bytes(gzip.compress(Path(f"rows.{kind}").read_bytes()))
        assert refusal(f"packed.{kind}.gz").startswith(f"packed.{kind}.gz is not a complete parquet or Arrow file (")
    Path("cut.arrow").write_bytes(Path("rows.arrow").read_bytes()[:-30])
    assert refusal("cut.arrow").startswith("cut.arrow is not a complete parquet or Arrow file (")
    Path("text.arrow").write_text("no arrow at all")
    assert refusal("text.arrow").startswith("text.arrow is not a complete parquet or Arrow file (")
