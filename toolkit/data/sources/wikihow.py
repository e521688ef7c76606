"""WikiHow: `wikihowAll.csv` (an article a row) and `wikihowSep.csv` (a paragraph a row), with their mess.

The steps' bold sentences (headline) are the summary of the text below them. Rows are chosen as the data set's authors do in
https://github.com/mahnazkoupaee/WikiHow-Dataset (process.py), which the Hugging Face script that the FSDP tutorial loads
follows; unlike theirs, our split is by title (their lists of titles are a download) and cleaning goes further, because both
files were scraped from lists: steps are joined by `.,`, `.;` and by lines that begin with a comma.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.data.sources.files import check_columns, read_csv_records
from toolkit.data.sources.row import Row

COLUMNS = ("text", "headline", "title")
LONGEST_HEADLINE_SHARE = 0.75

# What a list joined into one string leaves behind the end of a sentence. In running text a comma there may also follow an
# abbreviation ("e.g., red"), so it goes only where a new sentence starts.
_STRAY_IN_HEADLINE = re.compile(r"(?<=[.!?])[;,]+")
_STRAY_IN_TEXT = re.compile(r"(?<=[.!?])(?:;,?|,(?= [A-Z]|$))", re.MULTILINE)


def read_wikihow(path: Path) -> Iterator[Row]:
    """Cleaned rows; rows that cannot be used come with their reason, because a scraped file is full of them.

    Raises:
        UserError: a column of both files missing.
    """
    # Not strict: the authors' and the tutorial's readers take text after a closing quote, and so must we to get their rows.
    records = read_csv_records(path, strict=False)
    _, header = next(records, (1, []))
    check_columns(path, header, COLUMNS)
    text_cell, headline_cell, title_cell = (header.index(column) for column in COLUMNS)
    for _, cells in records:
        if len(cells) != len(header):
            yield Row(None, None, skip_reason="with too many or too few cells")
        else:
            yield _build_row(cells[text_cell], cells[headline_cell], cells[title_cell])


def _build_row(text: str, headline: str, title: str) -> Row:
    clean = Row(clean_text(text), clean_headline(headline), group=title_group(title))
    for name, cell in (("text", clean.source), ("headline", clean.target), ("title", title.strip())):
        if not cell:
            return clean._replace(skip_reason=f"with an empty {name}")
    # Lengths are compared as the authors' script sees them: a line break is one character, and nothing is cleaned yet.
    text, headline = (cell.replace("\r\n", "\n").strip() for cell in (text, headline))
    if len(headline) >= LONGEST_HEADLINE_SHARE * len(text):
        return clean._replace(skip_reason=f"whose headline is not shorter than {LONGEST_HEADLINE_SHARE} of the text")
    return clean


def clean_headline(headline: str) -> str:
    r"""One line: "\nWash it.,\nDry it.;" → "Wash it. Dry it."."""
    lines = (" ".join(line.split()).strip(" ;") for line in headline.splitlines())
    return _STRAY_IN_HEADLINE.sub("", " ".join(line for line in lines if line)).rstrip(" ,;")


def clean_text(text: str) -> str:
    r"""One line a paragraph: "Wash it well.;\n, Dry it.\n\n, Done." → "Wash it well.\nDry it.\nDone."."""
    lines = (" ".join(line.split()).lstrip(" ,;").rstrip(" ;") for line in text.splitlines())
    return _STRAY_IN_TEXT.sub("", "\n".join(line for line in lines if line)).rstrip(" ,;")


def title_group(title: str) -> str:
    """What titles of one article share: "How to Be an Organized Artist2" and "how to be an organized  artist" → the same.

    Methods of one article are rows of their own, numbered at the end. Two articles that differ in a number only
    ("Windows 7", "Windows 10") share a group too, which costs nothing: they just stay on one side.
    """
    letters = "".join(character for character in title.casefold() if character.isalnum())
    return letters.removeprefix("howto").rstrip("0123456789")
