"""Every sentence that `docs/troubleshooting.md` quotes is one that the code prints, word for word."""

import ast
import re
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
VALUE = re.compile(r"'?[A-Z][A-Z_0-9-]*(?:\.[a-z]+)?'?|[a-z]+\.[a-z_]+")
"""What the page writes in the place of a value: N, FILE.csv, data.files."""


def list_pieces(path: Path) -> set[str]:
    """The strings of a file, and what stands between the values of its f-strings; no docstrings, and no single letters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings)
    texts = {node.value for node in nodes if isinstance(node.value, str)}
    texts |= {f"{text.partition('. ')[0]}." for text in texts if ". " in text}  # a quote may end after a sentence
    return {text for text in texts if len(text) > 2 or not re.search(r"\w", text)} - {""}


PIECES = [list_pieces(path) for path in FILES]


def is_printed(quote: str) -> bool:
    """Whether pieces of one file make the sentence, with the page's values between them."""
    for pieces in PIECES:
        near, ends = [piece for piece in pieces if piece in quote], {0}
        for place in range(len(quote)):
            if place in ends:
                ends |= {place + len(piece) for piece in near if quote.startswith(piece, place)}
                ends |= {value.end() for value in [VALUE.match(quote, place)] if value}
        if len(quote) in ends:
            return True
    return False


@pytest.mark.parametrize("quote", QUOTES, ids=[MARK.sub("", quote)[:40] for quote in QUOTES])
def test_the_code_prints_it(quote):
    quote = quote.removesuffix(" …")
    assert is_printed(quote) or is_printed(MARK.sub("", quote))
    word = max(re.findall(r"(?<![.\w])[a-z]+(?![.\w])", MARK.sub("", quote)), key=len)
    assert not is_printed(MARK.sub("", quote).replace(word, f"{word}s")), "another word is found"


def test_the_reasons_of_the_hub_are_those_of_transformers():
    source = Path(transformers.utils.hub.__file__).read_text(encoding="utf-8")
    reasons = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", PAGE)
    assert len(reasons) == 3 and all(reason in source for reason in reasons)
