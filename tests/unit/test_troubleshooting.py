"""Every sentence that `docs/troubleshooting.md` quotes is one that the code prints, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import accelerate.utils.launch
import pytest
import transformers.utils.hub

from tests.support.launch import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
FILES = [*(REPOSITORY / "toolkit").rglob("*.py"), *(REPOSITORY / "recipes").rglob("*.py"), Path(accelerate.utils.launch.__file__)]

MARK = re.compile(r"^((error|WARNING): )?(PRESET\.yaml: |accelerate launch: )?")
"""What stands before a sentence: its level, and the YAML or the flags that a rule of launches is about."""
VALUE = r"'?[A-Z][A-Z_0-9-]*(?:\.[a-z]+)?'?|[a-z]+\.[a-z_]+"
"""What the page writes in the place of a value: N, FILE.csv, data.files."""
FEWEST_CHARACTERS = 7
"""Of a text in another one, without its values; shorter ones would fit anything."""

Parts = tuple[str | None, ...]
"""A text of the code; None is a value put into it."""


def list_texts(node: ast.AST) -> Iterator[Parts]:
    """The strings and f-strings under a node, those inside of f-strings too, but no docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.JoinedStr):
        yield tuple(str(part.value) if isinstance(part, ast.Constant) else None for part in node.values)
        children = [part for part in node.values if not isinstance(part, ast.Constant)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield (node.value,)
    for child in children:
        yield from list_texts(child)


TEXTS = [set(list_texts(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES]


def is_printed(quote: str, texts: set[Parts]) -> bool:
    """Whether texts of one file make the sentence. A value is one of the page's, or another text of the file, or empty."""
    if quote.endswith(" …"):
        texts, quote = {first_sentence(parts) for parts in texts}, quote.removesuffix(" …")
    near = [parts for parts in texts if all(literal in quote for literal in literals(parts))]
    inner = [parts for parts in near if len("".join(literals(parts))) >= FEWEST_CHARACTERS]
    values = VALUE
    for _ in range(2):  # texts inside of texts
        values = "|".join([as_pattern(parts, values) for parts in inner] + [VALUE])
    return any(re.fullmatch(as_pattern(parts, values), end) for parts in near for end in (quote, MARK.sub("", quote)))


def literals(parts: Parts) -> list[str]:
    return [part for part in parts if part is not None]


def first_sentence(parts: Parts) -> Parts:
    last = next((i for i, part in enumerate(parts) if part is not None and ". " in part), None)
    return parts if last is None else (*parts[:last], str(parts[last]).partition(". ")[0] + ".")


def as_pattern(parts: Parts, of_value: str) -> str:
    return "".join(f"(?:{of_value})?" if part is None else re.escape(part) for part in parts)


@pytest.mark.parametrize("quote", QUOTES, ids=[MARK.sub("", quote)[:40] for quote in QUOTES])
def test_the_code_prints_it(quote: str) -> None:
    assert any(is_printed(quote, texts) for texts in TEXTS)


def test_the_reasons_of_the_hub_are_those_of_transformers() -> None:
    source = Path(transformers.utils.hub.__file__).read_text(encoding="utf-8")
    reasons = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", PAGE)
    assert len(reasons) == 3 and all(reason in source for reason in reasons)
