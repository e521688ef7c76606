"""Functions to describe: the prompt is a function whose docstring has been removed, the completion its headline.

A run reads them with `data.source: recipes/sources/functions.py:load_rows`. A base is pretrained on the rows of `stdlib.py`; an
adapter then learns to write the headline. Both hold out the same modules. Sources are parsed, not imported.

A language model must read a function before it writes the headline. A prompt therefore has the function with its name in words
in place of the docstring, then the `def` line again up to the opening quotes. In all source text, a headline follows there.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from docstrings import (  # the file beside this one
    PACKAGES,
    ParsedModule,
    is_held_out,
    list_versions,
    normalize,
    parse_packages,
    parse_standard_library,
    split_headline,
    split_words,
)

MAX_BODY_CHARACTERS = 240  # compared to find copies
MAX_PROMPT_BODY_CHARACTERS = 80  # short prompts allow more training rows in the same time
MAX_BODY_LINE_CHARACTERS = 100
MAX_PARAMETERS = 8
# Shorter bodies can be equal by chance: `return self._name`.
MIN_COPIED_BODY_CHARACTERS = 80

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


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


def load_rows(config: object) -> list[dict[str, str]]:
    """The rows of a run, for its `data.source`."""
    return read_functions()


def identify(config: object) -> str:
    """The versions that decide the rows. To parse everything takes 20 seconds, which a run with the rows in its cache saves."""
    return list_versions()


def read_functions(packages: Sequence[str] = PACKAGES) -> list[dict[str, str]]:
    """Functions with a docstring from the standard library and from those `packages` (import names) that are installed.

    A row has `prompt`, `completion` (the headline), `lead_text` (the function's name in words), `group` (the module) and `split`
    (`train` or `eval`). The order is fixed and mixes the modules. No evaluation row shares its body, or its name and headline,
    with a training row or with a module that `stdlib.py` trains on.
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
    return sorted(
        rows, key=lambda row: hashlib.sha256((row["prompt"] + row["completion"]).encode(errors="surrogatepass")).digest()
    )


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


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
