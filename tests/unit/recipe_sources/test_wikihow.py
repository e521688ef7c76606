"""WikiHow files with the mess of the real ones."""

import csv
from types import SimpleNamespace

import pytest

from tests.unit.recipe_sources.sources import wikihow

# Shaped like the first rows of wikihowAll.csv: cells begin with a line break or a blank, lines end in \r\n, steps are joined
# by ".,", ";\n," and "\n\n,".
ARTIST_HEADLINE = (
    "\r\nKeep related supplies in the same area.,\r\nClean your workspace after every session!,\r\n"
    "Use clotheslines and clips to hang sketches, photos, and reference material.;"
)
ARTIST_TEXT = (
    " If you're a photographer, keep all lenses, cords, etc. in the same quadrant of your studio. Some ideas include:\r\n"
    "\r\n\r\nEssential supplies area -- the things you use every day.\r\nSecondary supplies area, tucked out of the way.;\r\n"
    ", This doesn't mean cleaning the entire studio, it  just means the area around the desk.\r\n\r\n"
    ", Plastic bottles for paint, pigment, etc., Simply string up the wires across a wall, e.g., along the ceiling.\r\n\r\n\r\n"
)


@pytest.fixture
def load(tmp_path):
    def load(*names, eval_files=()):
        files, eval_files = ([str(tmp_path / name) for name in names] for names in (names, eval_files))
        rows = list(wikihow.load_rows(SimpleNamespace(files=files, eval_files=eval_files)))
        load.skipped = {number: row["skip"] for number, row in enumerate(rows, start=1) if row["skip"]}
        return [row for row in rows if not row["skip"]]

    return load


def article(subject):
    """A text long enough for any short headline."""
    return f" This text about {subject} is much longer than its headline is.\n\n, It goes on for a while, as articles do."


def write_all(path, rows, columns=("headline", "title", "text")):
    """`wikihowAll.csv` with rows of (headline, title, text)."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_article_is_cleaned(tmp_path, load):
    write_all(tmp_path / "wikihowAll.csv", [(ARTIST_HEADLINE, "How to Be an Organized Artist1", ARTIST_TEXT)])
    (row,) = load("wikihowAll.csv")
    assert row["target"] == (
        "Keep related supplies in the same area. Clean your workspace after every session! "
        "Use clotheslines and clips to hang sketches, photos, and reference material."
    )
    assert row["source"] == (
        "If you're a photographer, keep all lenses, cords, etc. in the same quadrant of your studio. Some ideas include:\n"
        "Essential supplies area -- the things you use every day.\nSecondary supplies area, tucked out of the way.\n"
        "This doesn't mean cleaning the entire studio, it just means the area around the desk.\n"
        "Plastic bottles for paint, pigment, etc. Simply string up the wires across a wall, e.g., along the ceiling."
    )
    assert (row["group"], row["split"]) == ("beanorganizedartist", None)
    assert (
        wikihow.title_group("HowtoBeAnOrganizedArtist 2 ")
        == wikihow.title_group("how to be an organized  artist")
        == row["group"]
    )
    assert wikihow.clean_headline("\nWash the fruit,\nDry it;\n") == "Wash the fruit, Dry it"
    assert wikihow.clean_headline(";") == ""
    assert wikihow.clean_text("Stop; then look.;\n\n; \n, Go on.,") == "Stop; then look.\nGo on."


def test_sep_file_is_recognised_by_its_columns_and_another_refused(tmp_path, load):
    rows = [
        (" An overview,\nlong", "\nBuy a lens.", article("lenses"), "Steps", "How to Be a Photographer"),
        ("", "\nClean it.;", article("cleaning"), "", "How to Be a Photographer"),
    ]
    write_all(tmp_path / "wikihowSep.csv", rows, ("overview", "headline", "text", "sectionLabel", "title"))
    assert [row["target"] for row in load("wikihowSep.csv")] == ["Buy a lens.", "Clean it."]
    assert not load.skipped  # a missing overview or label is not ours to judge
    write_all(tmp_path / "rows.csv", [("a", "b")], ("source", "target"))
    with pytest.raises(ValueError, match=r"rows.csv has no column 'text' \(its columns: source, target\)"):
        load("rows.csv")


def test_unusable_rows_are_counted_by_reason(tmp_path, load):
    good, text = ("\nDo it.", "How to Do It", article("doing")), article("anything")
    rows = [
        (good, None),
        (("", "How to Have No Headline", text), "with an empty headline"),
        (("\r\n;", "How to Have Half a Headline", text), "with an empty headline"),
        (("\nDo this.", "How to Have No Text", ""), "with an empty text"),
        (("\nDo this.", "How to Have Almost No Text", " ;\n, "), "with an empty text"),
        (("\nDo this.", " ", text), "with an empty title"),
        (("only one cell",), "with too many or too few cells"),
        (("\nDo", "How to", text, "one more"), "with too many or too few cells"),
        (("\nDo it, longer than the text.", "How to Be Long", "Do."), "whose headline is not shorter than 0.75 of the text"),
        (("\nDo it.", "How to Do It2", article("doing")), "that repeat an earlier row"),
        (("\nDo it well.", "How to Do It", article("doing")), None),
    ]
    write_all(tmp_path / "wikihowAll.csv", [row for row, _ in rows])
    assert [row["target"] for row in load("wikihowAll.csv")] == ["Do it.", "Do it well."]
    assert load.skipped == {number: reason for number, (_, reason) in enumerate(rows, start=1) if reason}


@pytest.mark.parametrize(("headline_length", "is_kept"), [(74, True), (75, False)])
def test_headline_length_is_compared_as_the_authors_do(tmp_path, load, headline_length, is_kept):
    # 100 characters with its line break as one, as Python's text mode reads it; blanks around a cell do not count.
    text = "b" * 49 + "\r\n" + "b" * 50
    headline = "a" * headline_length
    write_all(tmp_path / "wikihowAll.csv", [(f"\r\n{headline} ", "How to Count", f" {text}\r\n")])
    assert [row["target"] for row in load("wikihowAll.csv")] == [headline] * is_kept


def test_titles_and_texts_of_evaluation_files_are_kept_out_of_training(tmp_path, load):
    other_method = ("\nDo it again.", "how to do it2", article("doing it again"))
    same_text = ("\nMake it.", "How to Make It", article("doing"))
    write_all(tmp_path / "eval.csv", [("\nDo it.", "How to Do It", article("doing"))])
    write_all(tmp_path / "train.csv", [other_method, same_text, ("\nRest.", "How to Rest", article("rest"))])
    rows = load("train.csv", eval_files=["eval.csv"])
    assert [(row["target"], row["split"]) for row in rows] == [("Do it.", "eval"), ("Rest.", "train")]
    assert load.skipped == dict.fromkeys([2, 3], "that are in data.eval_files too")
