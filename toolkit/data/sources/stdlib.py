"""Two sets of rows from Python source, for the demo LLM: plain text to pretrain on, and functions to describe.

A base model is pretrained on the standard library's source text. An adapter then learns to write the headline of a function
whose docstring has been removed. Both hold out the same modules, so that the base has never seen an evaluation function.
Sources are parsed, never imported: no code of a module runs.

A language model must read a function before it writes the headline. A prompt therefore has the function with its name in words
in place of the docstring, then the `def` line again up to the opening quotes. In all source text, a headline follows there.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import itertools
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from toolkit.data.sources.docstrings import (
    PACKAGES,
    ParsedModule,
    identify_docstrings,
    is_held_out,
    normalize,
    parse_packages,
    parse_standard_library,
    split_headline,
    split_words,
)

MAX_ROW_CHARACTERS = 700  # about 220 tokens of a vocabulary of 2,048
MAX_TABLE_CHARACTERS = 800  # longer assignments are tables, of characters or error codes
MAX_BODY_CHARACTERS = 240  # compared to find copies
MAX_PROMPT_BODY_CHARACTERS = 80  # short prompts allow more training rows in the same time
MAX_BODY_LINE_CHARACTERS = 100
MAX_PARAMETERS = 8
# Shorter bodies can be equal by chance: `return self._name`.
MIN_COPIED_BODY_CHARACTERS = 80
# These hold near-identical tables of characters, and help texts.
_SKIPPED_PACKAGES = {"encodings", "pydoc_data"}

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class _Piece(NamedTuple):
    text: str
    class_line: str
    """The `class` line of the class that the piece belongs to; else empty."""


class _Function(NamedTuple):
    module: str
    name: str
    class_name: str
    heads: tuple[str, str]
    """The `def` line without and with its decorators."""
    body: str
    headline: str
    headline_wraps: bool
    does_something: bool

    @property
    def headline_key(self) -> str:
        return f"headline {self.name.lower()} {normalize(self.headline)}"

    @property
    def keys(self) -> set[str]:
        """Two functions that share a key are copies. Overrides of a method repeat its headline."""
        is_copy_recognizable = len(self.body) >= MIN_COPIED_BODY_CHARACTERS
        return {self.headline_key} | ({f"body {normalize(self.body)}"} if is_copy_recognizable else set())


def read_modules() -> list[dict[str, str]]:
    """The standard library's source text, cut between definitions into rows of at most `MAX_ROW_CHARACTERS`.

    A row has `text`, `group` (the module) and `split` (`train` or `eval`). The order is fixed and mixes the modules, so that the
    first rows are a fair sample. Each part of a class that is cut begins with the `class` line. Long tables are left out.
    Only rows with a docstring are training rows: in the same number of steps, a small model then reads these, with the kind of
    prose that it must write later, two or three times instead of all code about once.
    """
    rows = [
        {"text": text, "group": module.name, "split": "eval" if is_held_out(module.name) else "train"}
        for module in parse_standard_library()
        if module.name.partition(".")[0] not in _SKIPPED_PACKAGES
        for text in _cut_module(module)
    ]
    rows = [row for row in rows if row["split"] == "eval" or '"""' in row["text"]]
    return sorted(rows, key=lambda row: _hash(row["group"] + row["text"]))


def read_functions(packages: Sequence[str] = PACKAGES) -> list[dict[str, str]]:
    """Functions with a docstring from the standard library and from those `packages` (import names) that are installed.

    A row has `prompt`, `completion` (the headline), `lead_text` (the function's name in words), `group` (the module) and `split`
    (`train` or `eval`). The order is fixed and mixes the modules. No evaluation row shares its body, or its name and headline,
    with a training row or with a module that `read_modules` trains on.
    """
    standard = list(_read_all(parse_standard_library()))
    training = [function for function in standard if not is_held_out(function.module)]
    base_keys = set().union(*(function.keys for function in training))
    held_out = [
        function
        for function in standard
        if is_held_out(function.module)
        and function.does_something
        and not function.headline_wraps
        and base_keys.isdisjoint(function.keys)
    ]
    training.extend(_read_all(parse_packages(packages)))

    # Evaluation rows come first, so that of two duplicates the training row is dropped.
    seen: set[str] = set()
    rows = []
    for split, functions in (("eval", held_out), ("train", training)):
        for function in functions:
            if seen.isdisjoint(function.keys):
                seen |= function.keys
                rows.append(_build_row(function, split))
    return sorted(rows, key=lambda row: _hash(row["prompt"] + row["completion"]))


def identify_modules() -> str:
    """Hex sha256 of what decides `read_modules`: the version of Python and the readers. Parses nothing."""
    return hashlib.sha256(sys.version.encode() + identify_docstrings(()).encode() + _read_this_file()).hexdigest()


def identify_functions(packages: Sequence[str] = PACKAGES) -> str:
    """Hex sha256 of what decides `read_functions`: also the versions of the packages. Parses nothing."""
    return hashlib.sha256(b"functions" + identify_docstrings(packages).encode() + _read_this_file()).hexdigest()


def _read_this_file() -> bytes:
    return Path(__file__).read_bytes()


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


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


def _read_all(modules: Iterable[ParsedModule]) -> Iterator[_Function]:
    for module in modules:
        lines = module.text.split("\n")  # as ast counts them; splitlines() also ends lines at form feeds
        for class_name, node in _find_functions(module.tree, class_name=""):
            docstring = ast.get_docstring(node)
            headline = split_headline(docstring) if docstring else None
            if headline is not None:
                yield _Function(
                    module=module.name,
                    name=node.name,
                    class_name=class_name,
                    heads=_build_heads(node),
                    body=_read_body(node, lines),
                    headline=headline.text,
                    headline_wraps=headline.wraps,
                    does_something=any(not _is_placeholder(statement) for statement in node.body),
                )


def _find_functions(node: ast.AST, class_name: str) -> Iterator[tuple[str, _FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _find_functions(child, class_name=child.name)
        elif isinstance(child, _FunctionNode):
            yield class_name, child
        elif isinstance(child, ast.If | ast.Try | ast.With):  # definitions for one platform or version
            yield from _find_functions(child, class_name)


def _is_placeholder(statement: ast.stmt) -> bool:
    """Whether a statement is typical of an abstract method's body."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass | ast.Raise)


def _build_heads(node: _FunctionNode) -> tuple[str, str]:
    """The `def` line without and with decorators; defaults and annotations are left out, as they say little for their length."""
    arguments = node.args
    parameters = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    parameters += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    parameters += [parameter.arg for parameter in arguments.kwonlyargs]
    parameters += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    head = f"{keyword} {node.name}({', '.join(parameters[:MAX_PARAMETERS])}):"
    decorators = [f"@{ast.unparse(part.func if isinstance(part, ast.Call) else part)}\n" for part in node.decorator_list]
    return head, "".join(decorators) + head


def _read_body(node: _FunctionNode, lines: list[str]) -> str:
    """The first lines after the docstring, with comments, without blank lines and indentation."""
    docstring_end = node.body[0].end_lineno or node.lineno
    body = [line.rstrip() for line in lines[docstring_end : node.end_lineno] if line.strip()]
    return _take_lines(
        [line[:MAX_BODY_LINE_CHARACTERS] for line in textwrap.dedent("\n".join(body)).split("\n")], MAX_BODY_CHARACTERS
    )


def _take_lines(lines: list[str], max_characters: int) -> str:
    """The first lines, up to `max_characters` in total; at least one."""
    num_characters = list(itertools.accumulate(map(len, lines)))
    return "\n".join(lines[: max(1, bisect.bisect_right(num_characters, max_characters))])


def _build_row(function: _Function, split: str) -> dict[str, str]:
    head, decorated_head = function.heads
    body = textwrap.indent(_take_lines(function.body.split("\n"), MAX_PROMPT_BODY_CHARACTERS) or "...", "    ")
    words = split_words(function.name).capitalize()
    # The name in words takes the docstring's place: the base model expects text there, and the headline begins with its tokens.
    prompt = f'{head}\n    """{words}"""\n{body}\n\n{decorated_head}\n    """'
    if function.class_name:
        prompt = f"class {function.class_name}:\n{textwrap.indent(prompt, '    ')}"
    return {
        "prompt": prompt,
        "completion": function.headline,
        "lead_text": words,
        "group": function.module,
        "split": split,
    }
