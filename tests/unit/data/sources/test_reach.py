"""Names and files that `datasets` would take for more than the user named: nothing outside of what was named is opened."""

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import datasets
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from mnist_config import ImageDataConfig
from mnist_images import load_images

from tests.support.refusals import refusal
from tests.support.rows import load_llm, load_t5, write
from toolkit.config.data import MixEntry
from toolkit.data.sources.hub import _check_files

NAMES = sorted(_PACKAGED_DATASETS_MODULES)
_opened: list[str] = []
_is_watching = False


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Files opened by Python in a working directory that holds a secret in every form; it begins with the test."""
    global _is_watching
    write("secrets.txt", "password: swordfish\n")
    write("secrets.json", '{"text": "swordfish"}\n')
    write("secrets.csv", "text\nswordfish\n")
    if not _opened:  # a hook stays for good
        _opened.append("")
        sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if _is_watching and event == "open" else None)
    _opened[1:], _is_watching = [], True
    yield _opened
    _is_watching = False


def llm(**settings) -> list[str]:
    return load_llm(**settings).train["text"][:]


def load_digits(source: str):
    return load_images(ImageDataConfig(source=source), 1)


@pytest.mark.parametrize("name", ["", " ", *NAMES, "Text", "JSON"])
def test_a_kind_of_file_is_no_dataset(opened, name):
    loads = [
        lambda: llm(source=name),
        lambda: llm(mix=[MixEntry(source="jsonl", files="rows.json"), MixEntry(source=name)]),
        lambda: load_t5(source=name, source_column="text", target_column="text2"),
        lambda: load_digits(name),
    ]
    own_names = ("csv", "json", "parquet", "arrow")  # which the check of the config wants files for
    for load in loads[2 * (name in own_names) :]:
        assert refusal(load)
    assert not [path for path in opened if "secrets" in path]


SOURCES = "csv, tsv, json, jsonl, parquet, arrow, txt"


@pytest.mark.parametrize(
    ("load", "key", "name", "kinds"),
    [
        (lambda: llm(mix=[MixEntry(source="Parquet")]), "data.mix[0].source", "Parquet", SOURCES),
        (lambda: llm(source="text"), "data.source", "text", SOURCES),
        (lambda: load_digits("imagefolder"), "data.source", "imagefolder", "digits, idx"),
    ],
)
def test_the_sentence_names_what_there_is(load, key, name, kinds):
    Path("text").mkdir()
    kind = "is a kind of file, not a dataset: give one of"
    assert refusal(load) == f"{key} {name} {kind} {kinds}, a hub id as in user/{name}, or ./{name} for a folder"
    assert refusal(llm, source="") == f"data.source is empty: give one of {SOURCES}, a hub id, or a folder"


@pytest.mark.parametrize("source", ["./text", "text/", "{here}/text"])
def test_a_folder_with_such_a_name_is_read_and_nothing_beside_it(opened, source):
    write("text/rows.csv", "text\nnamed by the user\n")
    assert llm(source=source.format(here=Path.cwd())) == ["named by the user"]
    assert any("rows.csv" in path for path in opened) and not [path for path in opened if "secrets" in path]


def write_readme(*lines: str, name: str = "README.md") -> None:
    """A dataset of one file, with this beside it."""
    write("data/rows.csv")
    write("secret.csv", "text\nswordfish\n")
    lines = ("configs:", *lines, "")
    write(f"data/{name}", "\n".join(["---", *lines[:-1], "---", ""] if name == "README.md" else lines))


@pytest.fixture
def requests(monkeypatch) -> Iterator[list[str]]:
    """The paths that were asked of a server at http://127.0.0.1:PORT; the first is its address."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "15")
            self.end_headers()
            self.wfile.write(b"text\nswordfish\n" * (self.command == "GET"))

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen.append(f"http://127.0.0.1:{server.server_address[1]}")
        yield seen
        server.shutdown()


OUTSIDE = "data.source data names a file outside of it in its README, "


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "name", ["{server}/a.csv", "zip://a.csv::{server}/a.zip", "hf://datasets/x/y/a.csv", "data:text/csv,text"]
)
def test_a_folder_reaches_no_network(file, name, key, requests):
    given = name.format(server=requests[0])
    write_readme("- config_name: default", "  data_files: rows.csv", "- config_name: more", f'  {key}: "{given}"', name=file)
    for load in (lambda: llm(source="data"), lambda: load_digits("data")):
        assert refusal(load) == f"{OUTSIDE}{given}: give that in data.files"
    assert requests[1:] == []


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
@pytest.mark.parametrize("name", ["..", "../*", "{here}", "x/../../secret.csv", "{here}/secret.csv", "*/../../secret.csv"])
def test_a_readme_reaches_nothing_outside_its_folder(key, name):
    write_readme("- config_name: default", f'  {key}: "{name.format(here=Path.cwd())}"')
    assert refusal(llm, source="data").startswith(OUTSIDE)


LEADS_OUT = "data.source data holds a link out of it or names a file there, {}: give that in data.files"


@pytest.mark.parametrize("place", ["{here}/secret.png", "secret.png", "{server}/secret.png"])
def test_rows_name_no_images_outside_their_folder(place, requests):
    Path("data").mkdir()
    for name in ("secret.png", "data/own.png"):
        PIL.Image.new("L", (2, 2)).save(name)
    schema = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}).arrow_schema

    def write_rows(path: str) -> None:
        for split in ("train", "test"):
            cells = {"image": [{"bytes": None, "path": path}] * 2, "label": [0, 1]}
            pq.write_table(pa.table(cells, schema=schema), f"data/{split}.parquet")

    write_rows(f"{Path.cwd()}/data/own.png")
    assert len(load_digits("data").train) == 2
    write_rows(named := place.format(here=Path.cwd(), server=requests[0]))
    assert refusal(load_digits, "data") == LEADS_OUT.format(named if "://" in named else f"{Path.cwd()}/secret.png")
    assert requests[1:] == []


def test_links_that_lead_out_are_refused_except_in_the_cache_of_the_hub():
    write("secret.csv", "text\nswordfish\n")
    Path("data").mkdir()
    Path("data/rows.csv").symlink_to("../secret.csv")
    assert refusal(llm, source="data") == LEADS_OUT.format(f"{Path.cwd()}/secret.csv")
    write("datasets--x/blobs/0123")
    write("datasets--x/snapshots/0a/README.md", "")
    Path("datasets--x/snapshots/0a/rows.csv").symlink_to("../../blobs/0123")
    Path("linked").symlink_to("datasets--x/snapshots/0a")
    assert llm(source="datasets--x/snapshots/0a") == llm(source="linked") == ["a row"]
    write("more/rows.csv")
    Path("more/in").mkdir()
    Path("more/in/again").symlink_to(Path.cwd())
    assert load_llm(source="more").readings[0] == "more: split train is rows.csv; left out: in/again"


def test_code_beside_the_files_is_not_run():
    write("data/rows.csv")
    write("data/rows.py", "raise SystemExit('run')\n")
    assert llm(source="data") == ["a row"]
    Path("data/rows.py").rename("data/data.py")
    assert "Dataset scripts are no longer supported, but found data.py" in refusal(llm, source="data")


@pytest.mark.parametrize(
    "file", ["https://x.org/a.csv", "hf://datasets/other/set@0/a.csv", "zip://a::https://x.org/a.zip", "/a.csv"]
)
def test_a_hub_dataset_reads_its_own_repository_only(file):
    def check(*files: str, base: str = "hf://datasets/me/set@0a/") -> None:
        builder = SimpleNamespace(base_path=base, config=SimpleNamespace(data_files={"train": files}))
        _check_files(builder, "me/set", None)

    check("hf://datasets/me/set@0a/a.csv", "zip://*.csv::hf://datasets/Me/set@refs%2Fconvert/a.zip")
    check("hf://buckets/me/set/a.csv", base="hf://buckets/me/set")
    outside = "data.source me/set names a file outside of it in its README, "
    assert refusal(check, "hf://datasets/me/set@0a/a.csv", file).startswith(outside)
