"""JSON lines hold any text, stay whole for other readers, and a broken one is named."""

import sys

import pytest

from tests.support.refusals import refusal
from toolkit.files.json_lines import encode_json_line, load_json_lines, read_json_lines, save_json_lines

EVERY_CHARACTER = [chr(i) for i in range(sys.maxunicode + 1)]


def test_every_character_comes_back_and_no_reader_splits_a_line(tmp_path):
    text = "".join(reversed(EVERY_CHARACTER))  # half surrogates too, of which no two make a pair
    path = tmp_path / "rows.jsonl"
    save_json_lines(path, [{text: text}, text])
    assert load_json_lines(path) == [{text: text}, text]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_text_in_any_script_stays_readable():
    assert encode_json_line({"text": "Zürich 北京\u2028"}) == '{"text": "Zürich 北京\\u2028"}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json_line(float("nan"))


def test_foreign_files(tmp_path):
    """A byte order mark, three kinds of line ends, blank lines, raw line separators in strings."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\n{"a": "x\u2028\x85y"}\r  \r[2]\n3'.encode())
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (3, {"a": "x\u2028\x85y"}), (5, [2]), (6, 3)]


@pytest.mark.parametrize("torn", [b'{"a": 1', b'"\xe2\x80', b"3", b'{"a": \n'])
def test_a_torn_end_is_left_out_on_demand(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n' + torn)
    assert load_json_lines(path, skip_torn_end=True) == [{"a": 0}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "Expecting value: column 7"),
        (b'"\xff"', "'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "maximum rec"),
    ],
)
@pytest.mark.parametrize("skip_torn_end", [False, True])
def test_a_broken_line_is_named(tmp_path, line, reason, skip_torn_end):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n\n" + line + b"\n2\n")
    sentence = refusal(load_json_lines, path, skip_torn_end=skip_torn_end)
    assert sentence.startswith(f"{path}, line 3: not JSON ({reason}")
    assert sentence.endswith("): correct or remove the line")
