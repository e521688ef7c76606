"""csv, jsonl and parquet files: what is read, what is skipped and reported, and the sentence for each kind of broken file."""

import json

import pytest

from toolkit.config.data import DataConfig
from toolkit.data.rows.load import load_rows
from toolkit.data.sources import files
from toolkit.errors import UserError


@pytest.fixture
def load(tmp_path):
    """Load rows from `tmp_path`, cached there too; everything goes to training unless a test says otherwise."""

    def load(source, paths, **settings):
        settings = {"eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **settings}
        names = [paths] if isinstance(paths, str) else paths
        return load_rows(DataConfig(source=source, files=[str(tmp_path / name) for name in names], **settings))

    return load


def write_parquet(path, columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)


def pairs(rows):
    return list(zip(rows.train["prompt"], rows.train["completion"], strict=True))


def refuse(load, source, name, *fragments, **settings):
    """The load fails with one sentence that holds every fragment; returns it."""
    with pytest.raises(UserError) as caught:
        load(source, name, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for fragment in fragments:
        assert fragment in sentence
    return sentence


def test_csv_reads_quotes_line_breaks_bom_and_crlf(tmp_path, load):
    (tmp_path / "rows.csv").write_bytes(
        b'\xef\xbb\xbfsource, target ,note\r\n"a, ""b""\r\nsecond line",short,1\r\n\r\n42,caf\xc3\xa9,\r\n'
    )
    rows = load("csv", "rows.csv")
    assert pairs(rows) == [('a, "b"\r\nsecond line', "short"), ("42", "café")]
    assert rows.train["lead_text"][:] == rows.train["prompt"][:]
    assert rows.train["row_id"][:] == [0, 1]
    assert rows.remarks == []
    assert len(rows.evaluation) == 0


def test_jsonl_reads_bom_crlf_blank_lines_and_absent_keys(tmp_path, load):
    (tmp_path / "rows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"target": "no source"}\r\n\r\n{"source": "a\\nb \xc3\xa9", "target": "t", "more": [1]}\r\n'
    )
    rows = load("jsonl", "rows.jsonl")
    assert pairs(rows) == [("a\nb é", "t")]
    assert rows.remarks == [f"skipped 1 of 2 rows of {tmp_path / 'rows.jsonl'} with an empty source (row 1)"]


def test_several_files_and_patterns_are_read_in_order_each_file_once(tmp_path, load):
    for name in ("b2", "b1", "a"):
        (tmp_path / f"{name}.csv").write_text(f"source,target\n{name},{name}\n")
    rows = load("csv", ["b?.csv", "a.csv", "b1.csv"])
    assert [source for source, _ in pairs(rows)] == ["b1", "b2", "a"]
    assert rows.train["row_id"][:] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_empty_cells_are_counted_skipped_and_reported(tmp_path, load, kind):
    cells = [("a", "x"), ("b", ""), (" \t", "y"), ("c", "  "), ("d", "z"), ("", ""), ("e", None), ("f", "")]
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("source,target\n" + "".join(f"{source},{target or ''}\n" for source, target in cells))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in cells))
    else:
        write_parquet(path, {"source": [source for source, _ in cells], "target": [target for _, target in cells]})
    rows = load(kind, path.name)
    assert pairs(rows) == [("a", "x"), ("d", "z")]
    assert rows.train["row_id"][:] == [0, 4]
    assert rows.remarks == [
        f"skipped 4 of 8 rows of {path} with an empty target (first: rows 2, 4, 7)",
        f"skipped 2 of 8 rows of {path} with an empty source (first: rows 3, 6)",
    ]


def test_missing_file_suggests_the_nearest_name(tmp_path, load):
    (tmp_path / "train_rows.csv").write_text("source,target\na,b\n")
    refuse(load, "csv", "train_row.csv", "data.files", "there is no file", f"did you mean {tmp_path / 'train_rows.csv'}?")
    refuse(load, "csv", "nowhere/rows.csv", f"the folder {tmp_path / 'nowhere'} does not exist")
    refuse(load, "csv", "zzz.csv", f"nothing in {tmp_path} has a name like it")
    refuse(load, "csv", "*.tsv", "no file matches", "*.tsv")


def test_unreadable_file_is_refused(tmp_path, load, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text("source,target\na,b\n")

    def deny(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", deny)  # chmod does not stop root
    refuse(load, "csv", "rows.csv", f"{path} cannot be read (Permission denied)")


def test_files_without_rows_are_refused(tmp_path, load):
    (tmp_path / "rows.csv").write_text("source,target\n")
    (tmp_path / "rows.jsonl").write_text("\n \n")
    write_parquet(tmp_path / "rows.parquet", {"source": [], "target": []})
    for kind in ("csv", "jsonl", "parquet"):
        refuse(load, kind, f"rows.{kind}", f"{tmp_path / f'rows.{kind}'} holds no rows")


def test_missing_column_names_those_that_exist(tmp_path, load):
    (tmp_path / "rows.csv").write_text("article,summary\na,b\n")
    (tmp_path / "rows.jsonl").write_text('{"article": "a"}\n{"summary": "b"}\n')
    write_parquet(tmp_path / "rows.parquet", {"article": ["a"], "summary": ["b"]})
    for kind in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"rows.{kind}"
        refuse(load, kind, path.name, f"{path} has no column 'source' (its columns: article, summary)", "data.source_column")
        refuse(load, kind, path.name, "no column 'target'", source_column="article")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_invalid_utf8_is_refused_by_line(tmp_path, load, kind, monkeypatch):
    path = tmp_path / f"rows.{kind}"
    path.write_bytes("source,target\né,b\n".encode() + b"caf\xe9,c\n")
    refuse(load, kind, path.name, f"{path}, line 3: byte 0xe9 is not valid UTF-8")
    # The same where a read ends inside a good character, and where the file ends inside one.
    for num_bytes in (1, 15, 20):
        monkeypatch.setattr(files, "_BYTES_PER_READ", num_bytes)
        refuse(load, kind, path.name, "line 3: byte 0xe9")
    path.write_bytes("source,target\né,b\n".encode() + "c,é".encode()[:-1])
    refuse(load, kind, path.name, "line 3: byte 0xc3", "unexpected end of data")


def test_truncated_and_damaged_parquet_is_refused(tmp_path, load):
    path = tmp_path / "rows.parquet"
    write_parquet(path, {"source": [f"text {i}" for i in range(3000)], "target": [f"t {i}" for i in range(3000)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refuse(load, "parquet", "rows.parquet", f"{path} is not a complete parquet or Arrow file")
    path.write_bytes(whole[:8] + b"\xff" * 5000 + whole[5008:])  # the footer is whole, the first column is not
    refuse(load, "parquet", "rows.parquet", f"{path} is not a complete parquet or Arrow file")


# The file's ending, its content, what the sentence says.
REFUSED = [
    ("csv", "source,target\na,\n ,b\n", "none of the 2 rows can be used"),
    ("csv", "source,target\na,\n ,b\n", "empty target (row 1)"),
    ("csv", "", "rows.csv is empty"),
    ("jsonl", "", "rows.jsonl is empty"),
    ("parquet", "", "rows.parquet is empty"),
    ("jsonl", '{"source": "a"}\n' * 1001 + "never reached\n", "has no column 'target' (its columns: source)"),
    ("csv", "source,target,source\na,b,c\n", "more than one column 'source'"),
    ("csv", 'source,target\n"two\nlines",b\n\nc,d,e\n', "rows.csv, line 5: 3 cells where the header has 2 (source, target)"),
    ("csv", 'source,target\na,b\nc,"never closed\nd,e\n', "rows.csv: the row that starts on line 3 is not valid CSV"),
    ("csv", 'source,target\n"a "quoted" word",b\n', "double the quotes inside"),
    ("csv", "source,target\na,b\nc,\0d\n", "rows.csv, line 3: a NUL byte"),
    ("jsonl", '{"source": "a" "target": "b"}', "line 1: not JSON (Expecting ',' delimiter: column 16"),
    ("jsonl", '{"source": "a", "target": "b"}\n\n["a", "b"]', "line 3: ['a', 'b'] is not a JSON object: write {"),
    ("jsonl", '{"source": "a", "target": 12}', "row 1, column target: 12 is of type int, not text"),
    ("jsonl", '{"source": "a", "target": ["b"]}', "is of type list, not text"),
    ("jsonl", r'{"source": "a\u0000b", "target": "b"}', "row 1, column source: the text holds a NUL character"),
    ("jsonl", r'{"source": "ab\ud83d", "target": "b"}', "character 3 is half a surrogate"),
]


@pytest.mark.parametrize(("kind", "text", "fragment"), REFUSED)
def test_a_file_that_is_not_rows_is_one_sentence(tmp_path, load, kind, text, fragment):
    (tmp_path / f"rows.{kind}").write_text(text)
    refuse(load, kind, f"rows.{kind}", fragment)
