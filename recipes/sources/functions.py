"""Functions and what they take, return and raise: the source is a function's code, the target says it in one sentence.

A run reads it with `data.source: recipes/sources/functions.py:load_rows`: T5 reads the columns `source` and `target`, a causal
model `prompt` and `completion`, the same texts. The sentence is read off the code by `ast`, so it is true, and a reader can check
a summary at a glance. Sources are parsed, never imported: no code of a package runs.

    def nametofont(name, root):
        return Font(name=name, exists=True, root=root)

    Takes name and root, returns Font(name=name, exists=True, root=root).
"""

import ast
import hashlib
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
)

# The dependencies with most functions, installed wherever a recipe runs. transformers, half as much again to parse, would add 8 %
# to the training rows.
ALL_PACKAGES = (*PACKAGES, "pandas", "sympy", "torch")
CODE_CHARACTERS = range(30, 141)
MAX_RETURN_CHARACTERS = 40
MAX_ITEMS = 4

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class _Function(NamedTuple):
    module: str
    head: str
    """The `def` line, without annotations and defaults."""
    code: str
    """The statements below it, without the docstring."""
    summary: str

    @property
    def keys(self) -> set[str]:
        """Two functions that share a key are copies."""
        return {f"code {normalize(self.code)}", f"summary {normalize(self.summary)}"}


def load_rows(config: object) -> list[dict[str, str]]:
    """The rows of a run, for its `data.source`."""
    return read_functions()


def identify(config: object) -> str:
    """The versions that decide the rows. To parse everything takes a minute, which a run with the rows in its cache saves."""
    return list_versions(ALL_PACKAGES)


def read_functions(packages: Sequence[str] = ALL_PACKAGES) -> list[dict[str, str]]:
    """Functions of the standard library and of those `packages` (import names) that are installed, in a fixed mixed order.

    A row has `source` and `target`, the same texts as `prompt` and `completion`, `lead_text` (the `def` line), `group` (the
    module) and `split` (`train` or `eval`). No evaluation row shares its code or its summary with another row, nor with a module
    that `stdlib.py` trains on. Half of the held-out modules are in no split: settings of the embedded runs were chosen on them.
    """
    standard = list(_read_all(parse_standard_library()))
    training = [function for function in standard if not is_held_out(function.module)]
    base_keys = set().union(*(function.keys for function in training))
    held_out = [function for function in standard if is_held_out(function.module) and base_keys.isdisjoint(function.keys)]
    training.extend(_read_all(parse_packages(packages)))

    # Evaluation rows come first, so that of two duplicates the training row is dropped.
    seen: set[str] = set()
    rows = []
    for split, functions in (("eval", held_out), ("train", training)):
        for function in functions:
            if seen.isdisjoint(function.keys):
                seen |= function.keys if split == "eval" else {f"code {normalize(function.code)}"}
                rows.append(_build_row(function, split))
    rows = [row for row in rows if row["split"] == "train" or not was_chosen_on(row["group"])]
    return sorted(rows, key=lambda row: _hash(row["source"] + row["target"]))


def was_chosen_on(module: str) -> bool:
    """Whether the settings of the embedded runs were chosen on the functions of a held-out module."""
    return _hash(f"chosen on {module}")[0] % 2 == 1


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _read_all(modules: Iterable[ParsedModule]) -> Iterator[_Function]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, _FunctionNode):
                statements = node.body[1:] if ast.get_docstring(node) else node.body
                code = "\n".join(map(ast.unparse, statements))
                summary = _summarize(node)
                if len(code) in CODE_CHARACTERS and summary:
                    yield _Function(module.name, f"def {node.name}({', '.join(_list_parameters(node))}):", code, summary)


def _list_parameters(node: _FunctionNode) -> list[str]:
    arguments = node.args
    parameters = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    parameters += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    parameters += [parameter.arg for parameter in arguments.kwonlyargs]
    return parameters + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _summarize(node: _FunctionNode) -> str | None:
    """One sentence; None for a function that takes nothing, or neither returns nor raises, or returns a long expression."""
    statements = list(_list_statements(node))
    parameters = [parameter for parameter in _list_parameters(node) if parameter not in ("self", "cls")]
    returned = [ast.unparse(part.value) for part in statements if isinstance(part, ast.Return) and part.value]
    errors = [part.exc for part in statements if isinstance(part, ast.Raise) and part.exc]
    raised = [ast.unparse(error.func if isinstance(error, ast.Call) else error) for error in errors]
    if not parameters or not (returned or raised) or max(map(len, (*returned, *raised))) > MAX_RETURN_CHARACTERS:
        return None
    returns = f", returns {_join(returned, 'or')}" if returned else ""
    raises = f", raises {_join(raised, 'or')}" if raised else ""
    return f"Takes {_join(parameters, 'and')}{returns}{raises}."


def _list_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node in text order, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            if not isinstance(child, _FunctionNode | ast.ClassDef):
                yield from _list_statements(child)


def _join(items: Sequence[str], conjunction: str) -> str:
    """ "a, b and c", each once, at most `MAX_ITEMS`."""
    distinct = list(dict.fromkeys(items))[:MAX_ITEMS]
    return f" {conjunction} ".join(filter(None, (", ".join(distinct[:-1]), distinct[-1])))


def _build_row(function: _Function, split: str) -> dict[str, str]:
    source = f"{function.head}\n{function.code}\n"
    return {
        "source": source,
        "target": function.summary,
        "prompt": source,
        "completion": function.summary,
        "lead_text": function.head,
        "group": function.module,
        "split": split,
    }
