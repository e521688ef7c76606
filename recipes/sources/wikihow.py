"""WikiHow: reads and cleans `wikihowAll.csv` (one article per row) and `wikihowSep.csv` (one paragraph per row).

A run reads them with `data.source: recipes/sources/wikihow.py:load_rows` and `data.files: wikihowAll.csv`.

The bold sentences of the steps (headline) are the summary of the text below them. Rows are selected as by the data set's
authors in https://github.com/mahnazkoupaee/WikiHow-Dataset (process.py); the Hugging Face script that the FSDP tutorial loads
does the same. Unlike theirs, our split is by title (their lists of titles are a download). Our cleaning goes further, because
both files were scraped from lists: steps are joined by `.,`, `.;` and by lines that begin with a comma.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from typing import Any

COLUMNS = ("text", "headline", "title")
LONGEST_HEADLINE_SHARE = 0.75

# Punctuation that a list joined into one string leaves after the end of a sentence. In running text such a comma may also follow
# an abbreviation ("e.g., red"), so it is removed only before a new sentence.
_STRAY_IN_HEADLINE = re.compile(r"(?<=[.!?])[;,]+")
_STRAY_IN_TEXT = re.compile(r"(?<=[.!?])(?:;,?|,(?= [A-Z]|$))", re.MULTILINE)


def load_rows(config: Any) -> Iterator[dict[str, str | None]]:
    """Yield cleaned rows of `config.eval_files` and `config.files`, unusable ones with a reason to skip them: scraped files are
    full of them. An article whose title or text is in an evaluation file is not trained on.

    Raises:
        ValueError: a file lacks a column that both files must have.
    """
    seen: set[int] = set()  # hashes, because the texts are large
    held_out: set[int] = set()
    for split, files in (("eval", config.eval_files), ("train" if config.eval_files else None, config.files)):
        for cells in itertools.chain.from_iterable(map(_read_cells, files)):
            source, target, group = clean_text(cells[0]), clean_headline(cells[1]), title_group(cells[2])
            pair, keys = hash((source, target)), {hash(f"text {source}"), hash(f"title {group}")}
            fault = _find_fault(cells, source, target)
            if not fault and pair in seen:
                fault = "that repeat an earlier row"
            elif not fault:
                seen.add(pair)
                if split == "eval":
                    held_out |= keys
                elif split == "train" and not keys.isdisjoint(held_out):
                    fault = "that are in data.eval_files too"
            yield {"source": source, "target": target, "group": group, "split": split, "skip": fault}


def identify(config: Any) -> str:
    """Nothing: the run hashes the files and this code anyway, and with this function it reads the rows only once."""
    return ""


def _read_cells(file: str) -> Iterator[list[str]]:
    """Yield text, headline and title of each row; of one with too many or too few cells, three empty ones."""
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is too low for some articles
    with open(file, encoding="utf-8-sig", newline="") as lines:
        # Not strict: the authors' and the tutorial's readers accept text after a closing quote; to get the same rows, so must we.
        records = (cells for cells in csv.reader(lines) if len(cells) > 1 or any(map(str.strip, cells)))
        header = [cell.strip() for cell in next(records, [])]
        for column in COLUMNS:
            if column not in header:
                raise ValueError(f"{file} has no column {column!r} (its columns: {', '.join(header)})")
        places = [header.index(column) for column in COLUMNS]
        for cells in records:
            yield [cells[place] for place in places] if len(cells) == len(header) else [""] * len(COLUMNS)


def _find_fault(cells: list[str], source: str, target: str) -> str | None:
    """Why a row is unusable; None if it is not."""
    if not any(cells):
        return "with too many or too few cells"
    for name, cell in (("text", source), ("headline", target), ("title", cells[2].strip())):
        if not cell:
            return f"with an empty {name}"
    # Lengths are compared as in the authors' script: before cleaning, with a line break as one character.
    text, headline = (cell.replace("\r\n", "\n").strip() for cell in cells[:2])
    if len(headline) >= LONGEST_HEADLINE_SHARE * len(text):
        return f"whose headline is not shorter than {LONGEST_HEADLINE_SHARE} of the text"
    return None


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
