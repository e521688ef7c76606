"""csv, jsonl and parquet files: what is read, what is skipped and reported, and the sentence for each kind of broken file."""

import json
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from tests.support.row_files import list_pairs, load_t5
from toolkit.data.sources import files


def write_parquet(path, columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)


def refuse(name, *fragments, **settings):
    """The load fails with one sentence that holds every fragment."""
    sentence = refusal(load_t5, name, **settings)
    for fragment in fragments:
        assert fragment in sentence


def test_csv_reads_quotes_line_breaks_bom_and_crlf():
    Path("rows.csv").write_bytes(
        b'\xef\xbb\xbfsource, target ,note\r\n"a, ""b""\r\nsecond line",short,1\r\n\r\n42,caf\xc3\xa9,\r\n'
    )
    rows = load_t5("rows.csv")
    assert list_pairs(rows) == [('a, "b"\r\nsecond line', "short"), ("42", "café")]
    assert rows.train["lead_text"][:] == rows.train["prompt"][:]
    assert rows.train["row_id"][:] == [0, 1]
    assert rows.remarks == []
    assert len(rows.evaluation) == 0


def test_csv_takes_cells_beyond_the_csv_modules_own_limit():
    long_text = "word " * 40_000
    Path("rows.csv").write_text(f"source,target\n{long_text},short\n")
    assert list_pairs(load_t5("rows.csv")) == [(long_text, "short")]


def test_jsonl_reads_bom_crlf_blank_lines_and_absent_keys():
    Path("rows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"target": "no source"}\r\n\r\n{"source": "a\\nb \xc3\xa9", "target": "t", "more": [1]}\r\n'
    )
    rows = load_t5("rows.jsonl")
    assert list_pairs(rows) == [("a\nb é", "t")]
    assert rows.remarks == ["skipped 1 of 2 rows of rows.jsonl with an empty source (row 1)"]


def test_parquet_reads_the_columns_named():
    write_parquet("rows.parquet", {"id": [1, 2], "article": ["a", "b"], "summary": ["x", "y"]})
    rows = load_t5("rows.parquet", source_column="article", target_column="summary")
    assert list_pairs(rows) == [("a", "x"), ("b", "y")]


def test_several_files_and_patterns_are_read_in_order_each_file_once():
    for name in ("b2", "b1", "a"):
        Path(f"{name}.csv").write_text(f"source,target\n{name},{name}\n")
    rows = load_t5("b?.csv", "a.csv", "b1.csv")
    assert [source for source, _ in list_pairs(rows)] == ["b1", "b2", "a"]
    assert rows.train["row_id"][:] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_empty_cells_are_counted_skipped_and_reported(kind):
    cells = [("a", "x"), ("b", ""), (" \t", "y"), ("c", "  "), ("d", "z"), ("", ""), ("e", None), ("f", "")]
    path = Path(f"rows.{kind}")
    if kind == "csv":
        path.write_text("source,target\n" + "".join(f"{source},{target or ''}\n" for source, target in cells))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in cells))
    else:
        write_parquet(path, {"source": [source for source, _ in cells], "target": [target for _, target in cells]})
    rows = load_t5(path.name, source=kind)
    assert list_pairs(rows) == [("a", "x"), ("d", "z")]
    assert rows.train["row_id"][:] == [0, 4]
    assert rows.remarks == [
        f"skipped 4 of 8 rows of {path} with an empty target (first: rows 2, 4, 7)",
        f"skipped 2 of 8 rows of {path} with an empty source (first: rows 3, 6)",
    ]


def test_missing_file_suggests_the_nearest_name(tmp_path):
    Path("train_rows.csv").write_text("source,target\na,b\n")
    refuse(f"{tmp_path}/train_row.csv", "data.files", "there is no file", f"did you mean {tmp_path / 'train_rows.csv'}?")
    refuse(f"{tmp_path}/nowhere/rows.csv", f"the folder {tmp_path / 'nowhere'} does not exist")
    refuse(f"{tmp_path}/zzz.csv", f"nothing in {tmp_path} has a name like it")
    refuse(f"{tmp_path}/*.tsv", "no file matches", "*.tsv")


def test_unreadable_file_is_refused(monkeypatch):
    path = Path("rows.csv")
    path.write_text("source,target\na,b\n")

    def deny(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", deny)  # chmod does not stop root
    refuse("rows.csv", f"{path} cannot be read (Permission denied)")


def test_files_without_rows_are_refused():
    Path("rows.csv").write_text("source,target\n")
    Path("rows.jsonl").write_text("\n \n")
    write_parquet("rows.parquet", {"source": [], "target": []})
    for kind in ("csv", "jsonl", "parquet"):
        refuse(f"rows.{kind}", f"rows.{kind} holds no rows", source=kind)


def test_missing_column_names_those_that_exist():
    Path("rows.csv").write_text("article,summary\na,b\n")
    Path("rows.jsonl").write_text('{"article": "a"}\n{"summary": "b"}\n')
    write_parquet("rows.parquet", {"article": ["a"], "summary": ["b"]})
    for kind in ("csv", "jsonl", "parquet"):
        path = Path(f"rows.{kind}")
        refuse(path.name, f"{path} has no column 'source' (its columns: article, summary)", "data.source_column", source=kind)
        refuse(path.name, "no column 'target'", source=kind, source_column="article")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_invalid_utf8_is_refused_by_line(kind, monkeypatch):
    path = Path(f"rows.{kind}")
    path.write_bytes("source,target\né,b\n".encode() + b"caf\xe9,c\n")
    refuse(path.name, f"{path}, line 3: byte 0xe9 is not valid UTF-8", source=kind)
    # The same where a read ends inside a good character, and where the file ends inside one.
    for num_bytes in (1, 15, 20):
        monkeypatch.setattr(files, "_BYTES_PER_READ", num_bytes)
        refuse(path.name, "line 3: byte 0xe9", source=kind)
    path.write_bytes("source,target\né,b\n".encode() + "c,é".encode()[:-1])
    refuse(path.name, "line 3: byte 0xc3", "unexpected end of data", source=kind)


GOOD = '{"source": "a", "target": "b"}\n'
REFUSED: list[tuple[str, str, list[str]]] = [
    *((kind, "", ["rows is empty"]) for kind in ("csv", "jsonl", "parquet")),
    *((kind, "source,target\na,b\nc,\0d\n", ["rows, line 3: a NUL byte"]) for kind in ("csv", "jsonl")),
    (
        "csv",
        "source,target\na,\n ,b\n",
        ["none of the 2 rows can be used", "1 of 2 rows", "empty target (row 1)", "empty source (row 2)"],
    ),
    ("csv", "source,target,source\na,b,c\n", ["more than one column 'source'", "): keep one of them"]),
    (
        "csv",
        'source,target\n"two\nlines",b\n\nc,d,e\n',
        ["rows, line 5: 3 cells where the header has 2 (source, target)"],
    ),
    ("csv", "source,target\na,b\nc\n", ["rows, line 3: 1 cells"]),
    ("csv", 'source,target\na,b\nc,"never closed\nd,e\nf,g\n', ["rows: the row that starts on line 3 is not valid CSV"]),
    ("csv", 'source,target\n"a "quoted" word",b\n', ["starts on line 2", "double the quotes inside"]),
    # A missing key is found before the end of a large file.
    ("jsonl", '{"source": "a"}\n' * 1001 + "never reached\n", ["has no column 'target' (its columns: source)"]),
    *(
        ("jsonl", f"{GOOD}\n{line}\n", [f"rows, line 3: {fragment}"])
        for line, fragment in (
            ('{"source": "a" "target": "b"}', "not JSON (Expecting ',' delimiter: column 16"),
            ('{"source": "a", "tar', "not JSON (Unterminated string"),
            ('["a", "b"]', "a JSON array, not an object"),
            ("3", "a JSON number, not an object"),
        )
    ),
    *(
        ("jsonl", f'{GOOD}{{"source": "c", "target": {value}}}\n', ["rows, row 2, column target", f"is of type {name}, not text"])
        for value, name in (("12", "int"), ("1.5", "float"), ("true", "bool"), ('["a"]', "list"))
    ),
    *(
        ("jsonl", f'{{"source": "{text}", "target": "b"}}\n', ["rows, row 1, column source", fragment])
        for text, fragment in ((r"a\u0000b", "NUL character"), (r"ab\ud83d", "character 3 is half a surrogate"))
    ),
]


@pytest.mark.parametrize(("kind", "text", "fragments"), REFUSED, ids=[" ".join(fragments) for *_, fragments in REFUSED])
def test_a_broken_file_is_refused_by_line_or_row(kind, text, fragments):
    Path("rows").write_text(text)
    refuse("rows", *fragments, source=kind)


def test_truncated_and_damaged_parquet_is_refused():
    path = Path("rows.parquet")
    write_parquet(path, {"source": [f"text {i}" for i in range(3000)], "target": [f"t {i}" for i in range(3000)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refuse("rows.parquet", f"{path} is not a complete parquet file")
    path.write_bytes(whole[:8] + b"\xff" * 5000 + whole[5008:])  # the footer is whole, the first column is not
    refuse("rows.parquet", f"{path} is not a complete parquet file")


def test_parquet_text_that_is_not_utf8_is_refused_by_row():
    import pyarrow as pa

    source = pa.array([b"good", b"caf\xe9"]).view(pa.string())
    write_parquet("rows.parquet", {"source": source, "target": ["a", "b"]})
    refuse("rows.parquet", "row 2: text that is not valid UTF-8")
