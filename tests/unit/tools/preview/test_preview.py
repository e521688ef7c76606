"""`preview`: its views hold what the run will take, whatever stands in the rows, and its refusals are sentences. The summary
of all rows: lengths, duplicates over both splits, special tokens."""

import html
import io
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from rich.cells import cell_len
from rich.console import Console

from tests.support.chats import build_chat_tokenizer
from tests.support.pages import Page
from tests.support.previews import (
    CASES,
    GOLDEN,
    HOSTILE,
    HOSTILE_ROWS,
    LONG,
    LONG_ROW,
    call_preview,
    save_hostile_rows,
    save_inputs,
)
from tests.support.rows import prepare_rows
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.collate import CausalCollator
from toolkit.errors import visible
from toolkit.evaluation.rows import EvaluationRows
from toolkit.launch.log import start_logging
from toolkit.objectives import built_in
from toolkit.tools.preview import preview
from toolkit.tools.preview.preview import collect, lines_of, list_parts, print_parts, render_page
from toolkit.tools.preview.row import TOKENS_OF_A_BLOCK, Tokens, shorten_tokens
from toolkit.tools.preview.step import CONTEXT, LOSS, LOST, NAMES
from toolkit.tools.preview.summary import MOST_BINS, _spread, summarize

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u061c\u2028\u202a-\u202e\u2066-\u2069\ufeff]")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    save_inputs(folder)
    save_hostile_rows(folder)
    return folder


@pytest.fixture(autouse=True)
def _at_the_inputs(inputs: Path, monkeypatch) -> None:
    monkeypatch.chdir(inputs)


@pytest.mark.parametrize("case", CASES)
def test_the_piped_view_is_the_golden_text_and_needs_no_weights_and_no_process_group(case, inputs, capsys):
    before = dict(PartialState._shared_state)  # another test's
    assert call_preview(CASES[case]) == 0
    golden = (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")
    assert f"$ python -m toolkit preview {CASES[case]}\n{capsys.readouterr().out}" == golden
    assert "\x1b" not in golden and not [*inputs.rglob("*.safetensors")] and not Path("runs").exists()
    assert not torch.distributed.is_initialized() and PartialState._shared_state == before


def test_a_terminal_gets_colours_in_place_of_marks_and_its_own_width(capsys):
    found = collect(["--config=chats.yaml"], None, None, 4, None)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system="truecolor", width=60, no_color=False)
    print_parts(list_parts(found, has_remarks=False), console)
    assert "\x1b[" in written.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "[[" not in plain and "~~" not in plain
    sections = plain.partition("tokens, with | between")[2]
    assert max(map(cell_len, sections.splitlines())) <= 60
    # Wrapped, but complete.
    for row in found.rows:
        for side in row.sides:
            tokens = "|".join(token.replace("\n", "⏎\n") for _, token in side.tokens)
            assert re.sub(r"\s", "", tokens) in re.sub(r"\s", "", plain)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as shown:
        for line in lines_of(Tokens([(CONTEXT, "a"), (CONTEXT, "b"), (LOSS, "c")]), console):
            console.print(line)
    assert shown.get() == "    a|b\x1b[2m|\x1b[0m\x1b[1;32mc\x1b[0m\n", "only the marks between tokens are dim"


def test_hostile_texts_stay_text_in_the_terminal(capsys):
    assert call_preview(HOSTILE_ROWS) == 0
    printed = capsys.readouterr().out
    assert not CONTROLS.search(printed.replace("\n", ""))
    for text in HOSTILE:
        # Tabs aside, what is printed is the text with its controls as escapes.
        assert f"    answer {visible(text)}<|im_end|>\n" in printed


def test_hostile_texts_stay_text_in_the_page(tmp_path, capsys):
    file = tmp_path / "page.html"
    assert call_preview(f"{HOSTILE_ROWS} --html {file}") == 0
    content, page = file.read_text(encoding="utf-8"), Page(file)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("style") == 1 and not {"script", "img", "link", "iframe", "b>"}.intersection(tags)
    allowed = {"class", "style", "title", "dir", "lang", "charset", "name", "content", "http-equiv", "tabindex"}
    assert {name for _, attributes in page.tags for name in attributes} <= allowed
    assert not re.search(r"(?i)https?:|url\(|@import", content)
    assert not CONTROLS.search(content.replace("\n", ""))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nanswer {}<|im_end|>\n"
    expected = {chat.format(visible(text), visible(text)) for text in HOSTILE}
    assert expected == set(page.blocks["text"])
    # The tokens spell the same text.
    assert {text.replace("⏎\n", "\n") for text in page.blocks["tokens"]} == expected
    assert not [*tmp_path.glob("*.tmp")]


@pytest.mark.parametrize("config", ["t5.yaml", "chats.yaml"])
def test_the_page_has_the_tokens_kinds_and_places_of_the_view(config, tmp_path):
    found = collect([f"--config={config}", "--run.name=<i>name"], None, None, 4, None)
    found.rows[0].sides[0].tokens.insert(1, (CONTEXT, "</s>"))  # as T5's last token
    content = render_page(found.title, list_parts(found, has_remarks=True))
    (tmp_path / "page.html").write_text(content)
    assert content.count("&lt;i&gt;name") == 2
    assert re.findall("<h3>([A-Z][a-z]+)</h3>", content) == ["Rows", "Lengths", "Tokenizer"]
    sides = [(row, side) for row in found.rows for side in row.sides]
    shown = ["".join(token for _, token in side.tokens) for _, side in sides]
    assert [text.replace("⏎\n", "\n") for text in Page(tmp_path / "page.html").blocks["tokens"]] == [
        visible(text) for text in shown
    ]
    kinds = []
    for row, side in sides:
        pack = found.step.find_pack(row.row_id)
        is_padded = pack is not None and pack.row_ids[-1] == row.row_id and pack.padding[side.name] > 0
        kinds += [kind for kind, _ in Tokens(side.tokens).by_kind()] + ["padding"] * is_padded
    assert re.findall(rf"<(?:span|p) class=({'|'.join(NAMES)})>", content) == kinds
    places = dict.fromkeys((str(pack.rank), str(pack.micro_batch + 1)) for pack in found.step.packs)
    assert re.findall(r"Process (\d+), micro-batch (\d+)", content) == [*places]
    assert content.count(' begins"') == sum(len(pack.begins) - 1 for pack in found.step.packs)
    assert f"<td>{html.escape('</s>' if config == 't5.yaml' else '<|im_end|>')}</td>" in content


def test_a_long_row_is_shortened_and_row_shows_it_in_full(tmp_path, capsys):
    assert call_preview(LONG_ROW) == 0
    shown = capsys.readouterr().out
    assert len(shown) < 20_000
    assert re.search(r"… 1[0-9]{2},[0-9]{3} characters are not shown: --row 0 shows all …", shown)
    assert re.search(r"48 of [0-9]{2},[0-9]{3} tokens, [0-9]{2},[0-9]{3} lost", shown)
    assert len(re.findall(r"… [0-9,]+ tokens are not shown: --row 0 shows all …", shown)) == 1
    assert call_preview(f"{LONG_ROW} --row 0 --html {tmp_path / 'row.html'}") == 0
    page = Page(tmp_path / "row.html")
    assert all(LONG in shown.replace("⏎", "") for shown in (*page.blocks["text"], *page.blocks["tokens"]))
    num_parts = sum(attributes.get("class") == "part" for _, attributes in page.tags)
    assert num_parts == -(-sum(tag == "i" for tag, _ in page.tags) // TOKENS_OF_A_BLOCK) > 10
    print_parts(list_parts(collect([*shlex.split(LONG_ROW)], None, None, 0, 0), has_remarks=False), Console())
    assert LONG in capsys.readouterr().out


def test_the_begin_the_cuts_and_the_end_of_a_long_row_are_shown_once():
    kinds = [(CONTEXT, 0, 10), (LOST, 10, 15), (CONTEXT, 15, 500), (LOST, 500, 1000)]
    tokens = [(kind, str(number)) for kind, first, last in kinds for number in range(first, last)]
    pieces = shorten_tokens(tokens, 7, is_whole=False)
    assert [piece for piece in pieces if isinstance(piece, str)] == [
        f"… {num} tokens are not shown: --row 7 shows all …" for num in (300, 380)
    ]
    shown = [token for piece in pieces if not isinstance(piece, str) for token in piece]
    assert shown == tokens[:160] + tokens[460:540] + tokens[920:]
    assert shorten_tokens(tokens, 7, is_whole=True) == [tokens]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--config chats.yaml --row 99", "--row is 99: give an id from 0 to 10"),
        ("--config t5.yaml --row 13", r"--row is 13, rows.jsonl, row 14, which is left out: the remarks above say why"),
        ("--config chats.yaml --rows=-1", "argument --rows: it is -1: give a whole number, 0 or more"),
        ("--config chats.yaml --html gone/page.html", "--html gone/page.html cannot be written .*: give a file in a folder that"),
        ("--config chats.yaml --html .", "--html . cannot be written .Is a directory.: give a file"),
        ("--config t5.yaml --recipe llm", "is not a key|unknown|data.max_source_length_tokens"),
        ("--config chats.yaml", "as several processes: start it without accelerate launch"),
    ],
)
def test_bad_input_is_one_sentence(flags, sentence, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2" if "several processes" in sentence else "1")
    assert call_preview(shlex.split(flags)) == 2
    printed = capsys.readouterr().err
    assert re.search(sentence, printed) and printed.count("error: ") == 1 and "Traceback" not in printed


def test_a_reader_that_stops_early_is_no_failure(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed_pipe:
        monkeypatch.setattr(preview, "collect", lambda _: None)
        monkeypatch.setattr(preview, "print_parts", lambda _, console: console.print("a line"))
        monkeypatch.setattr("sys.stdout", closed_pipe)
        start_logging()
        preview.preview([], config=[], html=None)
        # Python flushes once more at its exit: into nothing, not into the pipe.
        assert os.path.samestat(os.fstat(closed_pipe.fileno()), os.stat(os.devnull))


SOURCE = """
def load_rows(config):
    for number in range(40):
        yield {"text": "it is four " * (1 + number % 7), "split": "train"}
    yield {"text": "thanks <s>", "split": "train"}
    yield {"text": "it is four it is four ", "split": "eval"}
    yield {"text": "welcome", "split": "eval"}
"""


def test_the_summary_of_rows(tmp_path):
    """Numbers and lengths of rows are in the golden texts."""
    (tmp_path / "rows.py").write_text(SOURCE)
    build_chat_tokenizer().save_pretrained(tmp_path / "model")
    config = LLMDataConfig(source=f"{tmp_path}/rows.py:load_rows", cache_dir=str(tmp_path / "cache"), max_length_tokens=16)
    rows = prepare_rows(config, ModelConfig(name_or_path=str(tmp_path / "model")), 400)
    evaluation = EvaluationRows(rows.evaluation, rows.tokenizer, CausalCollator(0), built_in(config.objective))
    summary = summarize(rows, evaluation, config, "a model")
    assert json.loads(json.dumps(summary)) == summary, "plain values"
    # Duplicates, within the training rows and over both splits.
    sentences = " ".join(summary["duplicates"])
    row_ids = ("row 7 repeats row 0; row 8 repeats row 1", "row 41 (evaluation) is row 1 (training) again")
    assert all(words in sentences for words in ("33 of 41", "1 of 2", *row_ids))
    assert not set(summary["duplicates"]).intersection(summary["remarks"])
    # Special tokens, also one that a row writes.
    tokens_by_text = {token["text"]: token for token in summary["special_tokens"]}
    assert tokens_by_text["<s>"]["num_in_training"] == 1 and tokens_by_text["</s>"]["num_in_training"] == 41


@pytest.mark.parametrize("largest", [1, 2, 15, 16, 17, 999, 1024, 10**6])
def test_any_lengths_fit_few_bins_which_hold_every_row(largest):
    lengths = np.random.default_rng(0).integers(0, largest, size=50, endpoint=True)
    bins = _spread("row", lengths, None)["bins"]
    assert all(count == ((lengths >= low) & (lengths <= high)).sum() for low, high, count in bins)
    assert sum(count for *_, count in bins) == 50 and len(bins) <= MOST_BINS
    assert bins[0][0] <= lengths.min() and bins[-1][1] >= lengths.max()
