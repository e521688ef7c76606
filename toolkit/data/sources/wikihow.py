"""WikiHow: reads and cleans `wikihowAll.csv` (one article per row) and `wikihowSep.csv` (one paragraph per row).

The bold sentences of the steps (headline) are the summary of the text below them. Rows are selected as by the data set's
authors in https://github.com/mahnazkoupaee/WikiHow-Dataset (process.py); the Hugging Face script that the FSDP tutorial loads
does the same. Unlike theirs, our split is by title (their lists of titles are a download). Our cleaning goes further, because
both files were scraped from lists: steps are joined by `.,`, `.;` and by lines that begin with a comma.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.data.sources.files import check_columns, read_csv_records

COLUMNS = ("text", "headline", "title")
"""Of the files; the rows that are read from them have `source`, `target` and `group`."""
LONGEST_HEADLINE_SHARE = 0.75

# Punctuation that a list joined into one string leaves after the end of a sentence. In running text such a comma may also follow
# an abbreviation ("e.g., red"), so it is removed only before a new sentence.
_STRAY_IN_HEADLINE = re.compile(r"(?<=[.!?])[;,]+")
_STRAY_IN_TEXT = re.compile(r"(?<=[.!?])(?:;,?|,(?= [A-Z]|$))", re.MULTILINE)


def read_wikihow(path: Path) -> Iterator[dict[str, str] | str]:
    """Yield cleaned rows, and for an unusable one the reason to skip it, because a scraped file is full of them.

    Raises:
        UserError: a column that both files must have is missing.
    """
    # Not strict: the authors' and the tutorial's readers accept text after a closing quote; to get the same rows, so must we.
    records = read_csv_records(path, strict=False)
    _, header = next(records, (1, []))
    check_columns(path, header, COLUMNS)
    text_cell, headline_cell, title_cell = (header.index(column) for column in COLUMNS)
    for _, cells in records:
        if len(cells) != len(header):
            yield "with too many or too few cells"
        else:
            yield _build_row(cells[text_cell], cells[headline_cell], cells[title_cell])


def _build_row(text: str, headline: str, title: str) -> dict[str, str] | str:
    clean = {"source": clean_text(text), "target": clean_headline(headline), "group": title_group(title)}
    for name, cell in (("text", clean["source"]), ("headline", clean["target"]), ("title", title.strip())):
        if not cell:
            return f"with an empty {name}"
    # Lengths are compared as in the authors' script: before cleaning, with a line break as one character.
    text, headline = (cell.replace("\r\n", "\n").strip() for cell in (text, headline))
    if len(headline) >= LONGEST_HEADLINE_SHARE * len(text):
        return f"whose headline is not shorter than {LONGEST_HEADLINE_SHARE} of the text"
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
    """A key for all titles of an article: the same for "How to Be an Organized Artist2" and "how to be an organized  artist".

    The methods of an article are separate rows, numbered at the end. Two articles that differ only in a number
    ("Windows 7", "Windows 10") also share a group, which does no harm: they go into the same split.
    """
    letters = "".join(character for character in title.casefold() if character.isalnum())
    return letters.removeprefix("howto").rstrip("0123456789")
