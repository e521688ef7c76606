"""WikiHow files with the mess of the real ones."""

import csv

import pytest

from toolkit.config.data import DataConfig
from toolkit.data.rows.load import load_rows
from toolkit.data.sources.wikihow import clean_headline, clean_text, title_group
from toolkit.errors import UserError

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
    def load(*names, **settings):
        settings = {"eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **settings}
        return load_rows(DataConfig(source="wikihow", files=[str(tmp_path / name) for name in names], **settings))

    return load


def write_all(path, rows):
    """`wikihowAll.csv` with rows of (headline, title, text)."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("headline", "title", "text"), *rows])


def article(subject):
    """A text long enough for any short headline."""
    return f" This text about {subject} is much longer than its headline is.\n\n, It goes on for a while, as articles do."


def test_article_is_cleaned(tmp_path, load):
    write_all(tmp_path / "wikihowAll.csv", [(ARTIST_HEADLINE, "How to Be an Organized Artist1", ARTIST_TEXT)])
    row = load("wikihowAll.csv").train[0]
    assert row["completion"] == (
        "Keep related supplies in the same area. Clean your workspace after every session! "
        "Use clotheslines and clips to hang sketches, photos, and reference material."
    )
    assert row["prompt"] == (
        "If you're a photographer, keep all lenses, cords, etc. in the same quadrant of your studio. Some ideas include:\n"
        "Essential supplies area -- the things you use every day.\nSecondary supplies area, tucked out of the way.\n"
        "This doesn't mean cleaning the entire studio, it just means the area around the desk.\n"
        "Plastic bottles for paint, pigment, etc. Simply string up the wires across a wall, e.g., along the ceiling."
    )
    assert row["lead_text"] == row["prompt"]


def test_headline_without_full_stops_keeps_its_commas():
    assert clean_headline("\nWash the fruit,\nDry it;\n") == "Wash the fruit, Dry it"
    assert clean_headline(";") == ""


def test_text_keeps_semicolons_inside_sentences():
    assert clean_text("Stop; then look.;\n\n; \n, Go on.,") == "Stop; then look.\nGo on."


def test_sep_file_is_recognised_by_its_columns(tmp_path, load):
    rows = [
        ("overview", "headline", "text", "sectionLabel", "title"),
        (" An overview,\nlong", "\nBuy a lens.", article("lenses"), "Steps", "How to Be a Photographer"),
        ("", "\nClean it.;", article("cleaning"), "", "How to Be a Photographer"),
    ]
    with (tmp_path / "wikihowSep.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    read = load("wikihowSep.csv")
    assert read.train["completion"][:] == ["Buy a lens.", "Clean it."]
    assert read.remarks == []  # a missing overview or label is none of our business


def test_unusable_rows_are_counted_by_reason(tmp_path, load):
    path = tmp_path / "wikihowAll.csv"
    good, text = ("\nDo it.", "How to Do It", article("doing")), article("anything")
    write_all(
        path,
        [
            good,
            ("", "How to Have No Headline", text),
            ("\r\n;", "How to Have Half a Headline", text),
            ("\nDo this.", "How to Have No Text", ""),
            ("\nDo this.", "How to Have Almost No Text", " ;\n, "),
            ("\nDo this.", " ", text),
            ("only one cell",),
            ("\nDo", "How to", text, "one more"),
            ("\nDo it, and do it at length, longer than the text.", "How to Be Long", "Do it, and do it at length."),
            ("\nDo it.", "How to Do It2", article("doing")),
            ("\nDo it well.", "How to Do It", article("doing")),
        ],
    )
    rows = load("wikihowAll.csv")
    assert rows.train["completion"][:] == ["Do it.", "Do it well."]
    assert rows.train["row_id"][:] == [0, 10]
    assert rows.remarks == [
        f"skipped 2 of 11 rows of {path} with an empty headline (first: rows 2, 3)",
        f"skipped 2 of 11 rows of {path} with an empty text (first: rows 4, 5)",
        f"skipped 1 of 11 rows of {path} with an empty title (row 6)",
        f"skipped 2 of 11 rows of {path} with too many or too few cells (first: rows 7, 8)",
        f"skipped 1 of 11 rows of {path} whose headline is not shorter than 0.75 of the text (row 9)",
        f"skipped 1 of 11 rows of {path} that repeat an earlier row (row 10)",
    ]


@pytest.mark.parametrize(("headline_length", "is_kept"), [(74, True), (75, False)])
def test_headline_length_is_compared_as_the_authors_do(tmp_path, load, headline_length, is_kept):
    # 100 characters with its line break as one, as Python's text mode reads it; blanks around a cell do not count.
    text = "b" * 49 + "\r\n" + "b" * 50
    rows = [
        ("\r\n" + "a" * headline_length + " ", "How to Count", f" {text}\r\n"),
        ("\nDo it.", "How to Do It", article("doing")),
    ]
    write_all(tmp_path / "wikihowAll.csv", rows)
    assert ("a" * headline_length in load("wikihowAll.csv").train["completion"]) is is_kept


def test_text_after_a_closing_quote_is_taken_as_the_authors_reader_does(tmp_path, load):
    (tmp_path / "wikihowAll.csv").write_text(f'headline,title,text\n"Do" it.,How to Do It,"{article("doing")}"\n')
    assert load("wikihowAll.csv").train["completion"][:] == ["Do it."]


def test_titles_of_one_article_share_a_group():
    same = [
        "How to Be an Organized Artist1",
        "how to be an organized  artist",
        "How To Be an Organized Artist 2 ",
        "HowtoBeAnOrganizedArtist",
    ]
    assert {title_group(title) for title in same} == {"beanorganizedartist"}
    assert title_group("How to Be an Organised Painter") != title_group("How to Be an Organized Artist")


def test_no_title_is_on_both_sides_and_row_order_does_not_matter(tmp_path, load):
    variants = ["How to Do Thing {0}x", "how to do  thing {0}x1", "How To Do Thing {0}x2"]
    rows = [(f"\nDo {i}, {j}.", title.format(i), article(f"{i} and {j}")) for j, title in enumerate(variants) for i in range(60)]
    write_all(tmp_path / "one.csv", rows)
    write_all(tmp_path / "other.csv", rows[::-1])
    one, other = load("one.csv", eval_fraction=0.3), load("other.csv", eval_fraction=0.3)
    assert set(one.evaluation["completion"]) == set(other.evaluation["completion"])
    train, held_out = ({target.split(",")[0] for target in side["completion"]} for side in (one.train, one.evaluation))
    assert train and held_out and not train & held_out
    assert len(one.train) + len(one.evaluation) == 180
    assert one.fingerprint != other.fingerprint


def test_titles_of_evaluation_files_are_kept_out_of_training(tmp_path, load):
    path = tmp_path / "train.csv"
    held_out = ("\nDo it.", "How to Do It", article("doing"))
    other_method = ("\nDo it again.", "how to do it2", article("doing it again"))
    same_text = ("\nMake it.", "How to Make It", article("doing"))
    write_all(tmp_path / "eval.csv", [held_out])
    write_all(path, [other_method, same_text, ("\nRest.", "How to Rest", article("rest"))])
    rows = load("train.csv", eval_files=str(tmp_path / "eval.csv"))
    assert rows.train["completion"][:] == ["Rest."]
    assert rows.evaluation["completion"][:] == ["Do it."]
    assert rows.remarks == [f"skipped 2 of 3 rows of {path} that are in data.eval_files too (first: rows 1, 2)"]


def test_other_csv_is_refused(tmp_path, load):
    (tmp_path / "rows.csv").write_text("source,target\na,b\n")
    with pytest.raises(UserError, match=r"rows.csv has no column 'text' \(its columns: source, target\)"):
        load("rows.csv")


def test_columns_cannot_be_set(tmp_path, load):
    write_all(tmp_path / "wikihowAll.csv", [("\nDo it.", "How to Do It", article("doing"))])
    with pytest.raises(UserError, match="data.source_column is overview, but data.source wikihow knows its columns"):
        load("wikihowAll.csv", source_column="overview")


def test_invalid_utf8_is_refused_by_line(tmp_path, load):
    path = tmp_path / "wikihowAll.csv"
    path.write_bytes(b'headline,title,text\r\n"a\r\nb",t,"caf\xe9"\r\n')
    with pytest.raises(UserError, match=r"wikihowAll.csv, line 3: byte 0xe9 is not valid UTF-8"):
        load("wikihowAll.csv")
