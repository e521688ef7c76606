"""Plain text to pretrain on: the standard library's source text. `data.source: recipes/sources/stdlib.py:load_rows`.

`functions.py` holds out the same modules, so that a base model that was trained on these rows has never seen its evaluation rows.
Sources are parsed, never imported: no code of a module runs.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

from docstrings import ParsedModule, is_held_out, parse_standard_library  # the file beside this one

MAX_ROW_CHARACTERS = 700  # about 220 tokens of a vocabulary of 2,048
MAX_TABLE_CHARACTERS = 800  # longer assignments are tables, of characters or error codes
# These hold near-identical tables of characters, and help texts.
_SKIPPED_PACKAGES = {"encodings", "pydoc_data"}


class _Piece(NamedTuple):
    text: str
    class_line: str
    """The `class` line of the class that the piece belongs to; else empty."""


def load_rows(config: object) -> list[dict[str, str]]:
    """The standard library's source text, cut between definitions into rows of at most `MAX_ROW_CHARACTERS`.

    A row has `text`, `group` (the module) and `split` (`train` or `eval`). The order is fixed and mixes the modules, so that the
    first rows are a fair sample. Each part of a class that is cut begins with the `class` line. Long tables are left out.
    Only rows with a docstring are training rows: in the same number of steps, a small model then reads all of these, with the
    kind of prose that it must write later, instead of less than half of all code.
    """
    rows = [
        {"text": text, "group": module.name, "split": "eval" if is_held_out(module.name) else "train"}
        for module in parse_standard_library()
        if module.name.partition(".")[0] not in _SKIPPED_PACKAGES
        for text in _cut_module(module)
    ]
    rows = [row for row in rows if row["split"] == "eval" or '"""' in row["text"]]
    return sorted(rows, key=lambda row: hashlib.sha256((row["group"] + row["text"]).encode(errors="surrogatepass")).digest())


def identify(config: object) -> str:
    """The version that decides the rows. To parse everything takes seconds, which a run with the rows in its cache saves."""
    return sys.version


def _cut_module(module: ParsedModule) -> Iterator[str]:
    lines = module.text.split("\n")  # as ast counts them; splitlines() also ends lines at form feeds
    row, num_characters = list[str](), 0
    for piece in _cut_block(lines, module.tree.body, 0, len(lines), class_line=""):
        if row and num_characters + len(piece.text) > MAX_ROW_CHARACTERS:
            yield _join_row(row)
            row, num_characters = [], 0
        if not row and piece.class_line not in piece.text:
            row = [piece.class_line]
        row.append(piece.text)
        num_characters += len(piece.text) + 1
    if row:
        yield _join_row(row)


def _join_row(pieces: list[str]) -> str:
    return "\n".join(pieces).strip("\n") + "\n"


def _cut_block(lines: list[str], nodes: list[ast.stmt], start: int, end: int, class_line: str) -> Iterator[_Piece]:
    """Pieces of `lines[start:end]`, the block of `nodes`: each statement with the lines above it. No piece is blank."""
    for node in nodes:
        node_end = min(node.end_lineno or end, end)
        text = "\n".join(lines[start:node_end])
        if isinstance(node, ast.ClassDef) and len(text) > MAX_ROW_CHARACTERS:
            # The class header ends where the first statement begins.
            yield from _cut_block(lines, node.body, start, node_end, class_line=lines[node.lineno - 1])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and len(text) > MAX_TABLE_CHARACTERS:
            pass
        else:
            yield from _cut_lines(text, class_line)
        start = max(start, node_end)


def _cut_lines(text: str, class_line: str) -> Iterator[_Piece]:
    """`text` in one piece if it fits into a row, else cut at line ends."""
    piece, num_characters = list[str](), 0
    for line in text.split("\n"):
        if piece and num_characters + len(line) > MAX_ROW_CHARACTERS:
            yield _Piece("\n".join(piece), class_line)
            piece, num_characters = [], 0
        piece.append(line)
        num_characters += len(line) + 1
    if text.strip():
        yield _Piece("\n".join(piece), class_line)
