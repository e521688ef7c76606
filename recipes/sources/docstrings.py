"""Summarization rows from docstrings: the source is an object's name and the docstring's body, the target its headline.

A run reads it with `data.source: recipes/sources/docstrings.py:load_rows`. Every machine with Python has this data set, so an
example can train on real text without a download. The evaluation split consists of entire modules of the standard library; the
training split has the other modules and the installed packages. Sources are parsed, never imported: no code of a package runs.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Dependencies of the toolkit whose docstrings read like the standard library's. torch, sympy, pandas and transformers are
# large, but about their own subjects: adding torch's rows gave the same bits per byte and a lower ROUGE after as many
# training steps. setuptools and multiprocess are left out because they contain copies of standard modules.
PACKAGES = (
    "accelerate", "aiohttp", "anyio", "datasets", "fsspec", "httpx2", "huggingface_hub", "networkx", "numpy", "peft", "pip",
    "requests", "urllib3",
)  # fmt: skip

EVAL_PERCENT = 14
MIN_EVAL_BODY_CHARACTERS = 120
HEADLINE_CHARACTERS = range(10, 141)
MAX_PARAMETERS = 8
# Tests, copies, and applications that some distributions ship separately; without them all machines have equal evaluation rows.
SKIPPED_FOLDERS = {"idlelib", "lib2to3", "turtledemo", "test", "tests", "testing", "site-packages", "_vendor"}

# "HTTPServer" → HTTP, Server; "handle_error2" → handle, error, 2: words that the headline is likely to repeat.
_IDENTIFIER_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

# "spawnv(mode, file, args) -> integer" says nothing about what the function does.
_SIGNATURE = re.compile(r"[\w.]+\(|.* -> ")

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class ParsedModule(NamedTuple):
    """One file of Python source."""

    name: str
    """The dotted import name."""
    text: str
    tree: ast.Module


class Headline(NamedTuple):
    """A docstring, split by `split_headline`."""

    text: str
    """The first paragraph, on one line."""
    rest: str
    """Everything after it, unchanged."""
    wraps: bool
    """Whether the first paragraph takes more than one line."""


class _Docstring(NamedTuple):
    module: str
    name: str
    title: str
    headline: str
    body: str
    headline_wraps: bool

    @property
    def body_key(self) -> str:
        return normalize(self.body)

    @property
    def headline_key(self) -> tuple[str, str]:
        """Identifies overrides and copies of a method: they repeat its name and headline, but may differ in title and body."""
        return self.name.lower(), normalize(self.headline)


def load_rows(config: object) -> list[dict[str, str]]:
    """The rows of a run, for its `data.source`."""
    return read_docstrings()


def identify(config: object) -> str:
    """The versions that decide the rows. To parse everything takes ten seconds, which a run with the rows in its cache saves."""
    return list_versions()


def read_docstrings(packages: Sequence[str] = PACKAGES) -> list[dict[str, str]]:
    """Rows from the standard library and from those `packages` (import names) that are installed, in a fixed order.

    A row has `source` (a title line, then the body on one line), `target` (the headline), `lead_text` (only the body),
    `group` (the module) and `split` (`train` or `eval`). No body and no pair of name and headline occurs in both splits.
    """
    standard = list(_read_all(parse_standard_library()))
    held_out = [item for item in standard if is_held_out(item.module)]
    training = [item for item in standard if not is_held_out(item.module)]
    training.extend(_read_all(parse_packages(packages)))

    # Evaluation rows come first, so that of two duplicates the training row is dropped.
    eval_items = [item for item in held_out if len(item.body) >= MIN_EVAL_BODY_CHARACTERS and not item.headline_wraps]
    bodies: set[str] = set()
    headlines: set[tuple[str, str]] = set()
    rows = []
    for split, items in (("eval", eval_items), ("train", training)):
        for item in items:
            if item.headline_key in headlines or item.body_key in bodies:
                continue
            headlines.add(item.headline_key)
            if item.body_key:
                bodies.add(item.body_key)
            rows.append(_build_row(item, split))
    return rows


def list_versions(packages: Sequence[str] = PACKAGES) -> str:
    """The versions of Python and of those `packages` that are installed."""
    versions = [f"python {sys.version}"]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return "\n".join(versions)


def parse_standard_library() -> Iterator[ParsedModule]:
    """The modules of the running interpreter's standard library, in a fixed order, without tests and applications."""
    yield from _parse_tree(Path(sysconfig.get_path("stdlib")), prefix="")


def parse_packages(packages: Sequence[str]) -> Iterator[ParsedModule]:
    """The modules of those `packages` (import names) that are installed. Finding a top-level package does not import it."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from _parse_tree(Path(folder), prefix=f"{package}.")


def is_held_out(module: str) -> bool:
    """Whether a module of the standard library is for evaluation. The same on every machine, unlike Python's `hash`."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4]) % 100 < EVAL_PERCENT


def split_headline(docstring: str) -> Headline | None:
    """Split off the first paragraph as headline; None if it is a signature, a field list, a banner or a long text."""
    first_paragraph, _, rest = docstring.partition("\n\n")
    headline = " ".join(first_paragraph.split())
    is_sentence = headline[:1] not in ("@", ":", ">") and re.search("[a-z]", headline) and not _SIGNATURE.match(headline)
    if len(headline) not in HEADLINE_CHARACTERS or not is_sentence:
        return None
    return Headline(text=headline, rest=rest, wraps="\n" in first_paragraph.strip())


def split_words(identifier: str) -> str:
    """`HTTPServer.handle_error2` → "http server handle error 2"."""
    return " ".join(word.lower() for word in _IDENTIFIER_WORD.findall(identifier))


def normalize(text: str) -> str:
    """Lower-case a text and reduce punctuation and white space to single spaces, to compare texts."""
    return re.sub(r"\W+", " ", text).lower().strip()


def _build_row(item: _Docstring, split: str) -> dict[str, str]:
    # One-line docstrings become training rows too, with only the title as source: they teach how a name becomes a sentence.
    source = f"{item.title}\n{item.body}" if item.body else item.title
    return {"source": source, "target": item.headline, "lead_text": item.body, "group": item.module, "split": split}


def _parse_tree(root: Path, prefix: str) -> Iterator[ParsedModule]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.name.startswith("test_"):
            continue
        module = (prefix + ".".join(relative.with_suffix("").parts)).removesuffix(".__init__")
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences in other people's strings
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue  # another encoding, or written for another version of Python
        yield ParsedModule(module, text, tree)


def _read_all(modules: Iterable[ParsedModule]) -> Iterator[_Docstring]:
    for module in modules:
        yield from _read_node(module.tree, module.name, qualified_name=())


def _read_node(node: _Documented, module: str, qualified_name: tuple[str, ...]) -> Iterator[_Docstring]:
    docstring = ast.get_docstring(node)
    if docstring:
        item = _split_docstring(node, module, qualified_name, docstring)
        if item is not None:
            yield item
    yield from _read_children(node, module, qualified_name)


def _read_children(node: ast.AST, module: str, qualified_name: tuple[str, ...]) -> Iterator[_Docstring]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _read_node(child, module, (*qualified_name, child.name))
        elif isinstance(child, ast.If | ast.Try | ast.With):  # definitions for one platform or version
            yield from _read_children(child, module, qualified_name)


def _split_docstring(node: _Documented, module: str, qualified_name: tuple[str, ...], docstring: str) -> _Docstring | None:
    headline = split_headline(docstring)
    if headline is None:
        return None
    path = qualified_name or tuple(module.split("."))
    return _Docstring(
        module=module,
        name=path[-1],
        title=_build_title(node, path),
        headline=headline.text,
        body=" ".join(headline.rest.split()),
        headline_wraps=headline.wraps,
    )


def _build_title(node: _Documented, path: tuple[str, ...]) -> str:
    """`BaseServer.handle_error(self, request)` → "Handle error : base server function ( request )"."""
    kind, arguments = "module", list[str]()
    if isinstance(node, ast.ClassDef):
        kind, arguments = "class", [ast.unparse(base) for base in node.bases]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        kind = "function"
        parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        arguments = [parameter.arg for parameter in parameters if parameter.arg not in ("self", "cls")]
    # The object's own name comes first and is capitalized, as the headline is, so that its tokens can be copied. Only the
    # nearest enclosing name follows, because outer names rarely occur in the headline.
    title = " ".join(filter(None, (split_words(path[-1]).capitalize(), ":", split_words(".".join(path[-2:-1])), kind)))
    if not arguments:
        return title
    return f"{title} ( {' , '.join(split_words(argument) for argument in arguments[:MAX_PARAMETERS])} )"
