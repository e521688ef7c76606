"""Local folders as `data.source`: which files a split is made of, how they are read, and what is not reached from them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
from mnist_config import ImageDataConfig
from mnist_images import load_images

from toolkit.config.data import LLMDataConfig
from toolkit.data.rows.load import TextRows, load_rows
from toolkit.data.sources.hub import _check_files
from toolkit.errors import UserError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a folder `data`, and a secret beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    monkeypatch.chdir(here)
    write("secret.csv", "text\nswordfish\n")
    return here


def write(place: str, content: str = "text\na row\n") -> None:
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(content, encoding="utf-8")


def write_readme(*lines: str, folder: str = "data") -> None:
    write(f"{folder}/README.md", "\n".join(["---", "configs:", *lines, "---", ""]))


def load(source: str = "data", **settings: Any) -> TextRows:
    return load_rows(LLMDataConfig(source=source, eval_fraction=0.0, cache_dir="cache", **settings))


def texts(source: str = "data", **settings: Any) -> list[str]:
    return load(source, **settings).train["text"][:]


def split_line(source: str = "data", **settings: Any) -> str:
    return load(source, **settings).readings[0]


def refusal(source: str = "data", **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_of_save_to_disk_is_read_by_its_splits() -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    dataset.save_to_disk("data", num_shards=2)
    datasets.load_from_disk("data").map(lambda row: {"text": row["text"].upper()})
    assert list(Path("data").glob("cache-*.arrow"))
    assert texts() == ["one", "two", "three"]
    assert split_line() == "data: split train is data-00000-of-00002.arrow, data-00001-of-00002.arrow, by save_to_disk"
    datasets.DatasetDict(train=dataset, test=dataset.select([2, 0])).save_to_disk("both")
    assert texts("both", hub_split="test") == ["three", "one"]
    assert load("both", hub_eval_split="test").evaluation["text"][:] == ["three", "one"]
    assert refusal("both", hub_split="dev") == (
        "data.source both has no split dev, but train and test: set data.hub_split to one of them"
    )
    Path("both/train/state.json").write_text('{"_data_files": [{"filename": "../../secret.csv"}]}')
    assert refusal("both").startswith("data.source both holds a link out of it or names a file there, ")


def test_the_files_of_a_split_and_those_left_out_are_named() -> None:
    for name in ("train-1.jsonl", "train-0.json", "test-0.jsonl", "more.jsonl", ".hidden.jsonl", "notes.txt"):
        write(f"data/{name}", json.dumps({"text": name}))
    assert texts() == ["train-0.json", "train-1.jsonl"]
    left_out = "; left out: more.jsonl, notes.txt, test-0.jsonl (split test), .hidden.jsonl"
    assert split_line() == f"data: split train is train-0.json, train-1.jsonl{left_out}"
    assert split_line(hub_split="test").startswith("data: split test is test-0.jsonl; left out: more.jsonl, notes.txt, train-0")
    for name in ("a\x1b]0;.csv", ".b\nc"):
        write(f"escaped/{name}")
    assert split_line("escaped") == r"escaped: split train is a\x1b]0;.csv; left out: .b\nc"
    write("states/state.json", '[{"text": "Ohio"}]')  # no folder of save_to_disk
    assert texts("states") == ["Ohio"]


def test_notes_are_not_taken_for_rows_beside_tables() -> None:
    for name in ("rows.jsonl", "LICENSE.txt", "NOTES.txt"):
        write(f"data/{name}", '{"text": "a"}\n')
    assert refusal() == "data.source data holds LICENSE.txt, NOTES.txt and rows.jsonl: name files in data.files"
    Path("data/NOTES.txt").unlink()
    assert split_line() == "data: split train is rows.jsonl; left out: LICENSE.txt"


@pytest.mark.parametrize("said", ["dataset_info: [1]", "configs: [1]", "configs: [{config_name: a, data_dir: 5}]", "x: ["])
def test_a_readme_of_another_form_is_one_sentence(said: str) -> None:
    write("data/rows.csv")
    write("data/README.md", f"---\n{said}\n---\n")
    assert refusal().startswith("data.source data (subset None, split train) could not be loaded: ")


def test_an_unknown_split_is_refused_with_the_files_of_the_others() -> None:
    write("data/test-notes.jsonl", '{"text": "a"}\n')
    sentence = (
        "data.source data has no split {}, but test (test-notes.jsonl), by its README, else by the names of "
        "files and folders: set data.hub_split or data.hub_eval_split, or name files in data.files"
    )
    assert refusal() == sentence.format("train")
    assert refusal(hub_split="test[:1]") == sentence.format("test[:1]")


def test_rows_are_read_as_those_of_files() -> None:
    write("data/a.csv", 'text;n\n"NA";1\nnull;2\n007;3\n')
    assert texts(csv_delimiter=";") == ["007"]
    write("lines/a.jsonl", '{"text": "a", "n": 1}\n{"text": "b", "n": "x"}\n')
    assert texts("lines") == ["a", "b"]
    first = load("lines").fingerprint
    Path("lines").rename("moved")
    assert load("moved").fingerprint == first == load("", files="moved/a.jsonl").fingerprint


def test_a_readme_chooses_subsets_and_splits() -> None:
    for name in ("a", "b", "c"):
        write(f"data/parts/{name}.csv", f"text\n{name}\n")
    write_readme(
        "- config_name: small",
        "  data_files: [{split: train, path: parts/a.csv}, {split: test, path: parts/b.*}]",
        "- {config_name: all, default: true, data_files: ./parts/*.csv}",
    )
    assert texts() == ["a", "b", "c"]
    assert texts(hub_subset="small") == ["a"] and texts(hub_subset="small", hub_split="test") == ["b"]
    assert "subset none" in refusal(hub_subset="none") and "BuilderConfig 'none' not found" in refusal(hub_subset="none")
    write_readme("- config_name: default", "  data_files: none.csv")
    assert refusal().endswith(f" could not be loaded: Unable to find '{Path.cwd()}/data/none.csv'")
    # What only `datasets` can read is read by it.
    write("data/a.csv", "text;n\na;1\n")
    write_readme("- config_name: default", "  data_files: a.csv", '  sep: ";"')
    assert texts() == ["a"]
    assert load().readings == [
        "data: split train is a.csv; left out: parts/a.csv, parts/b.csv, parts/c.csv",
        "data: read as text, from text; not read: n",
    ]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
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


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "name", ["{server}/a.csv", "zip://a.csv::{server}/a.zip", "hf://datasets/x/y/a.csv", "data:text/csv,text"]
)
def test_a_folder_reaches_no_network(file: str, name: str, requests: list[str]) -> None:
    write("data/rows.csv")
    given = name.format(server=requests[0])
    for key in ("data_files", "data_dir"):
        write_readme("- config_name: default", "  data_files: rows.csv", "- config_name: more", f'  {key}: "{given}"')
        if file != "README.md":
            write(f"data/{file}", Path("data/README.md").read_text().replace("---\n", ""))
            Path("data/README.md").unlink()
        sentence = f"data.source data names a file outside of it in its README, {given}: give that in data.files"
        assert refusal() == sentence
        with pytest.raises(UserError, match="names a file outside of it in its README"):
            load_images(ImageDataConfig(source="data"), 1)
    assert requests[1:] == []


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
@pytest.mark.parametrize("name", ["..", "../*", "{here}", "x/../../secret.csv", "{here}/secret.csv", "*/../../secret.csv"])
def test_a_readme_reaches_nothing_outside_its_folder(key: str, name: str) -> None:
    write("data/rows.csv")
    write_readme("- config_name: default", f'  {key}: "{name.format(here=Path.cwd())}"')
    assert "names a file outside of it in its README" in refusal()


@pytest.mark.parametrize("place", ["{here}/secret.png", "secret.png", "{server}/secret.png"])
def test_rows_name_no_images_outside_their_folder(place: str, requests: list[str]) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    PIL.Image.new("L", (2, 2)).save("secret.png")
    PIL.Image.new("L", (2, 2)).save("data/own.png")
    schema = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}).arrow_schema
    named = place.format(here=Path.cwd(), server=requests[0])
    for path in (f"{Path.cwd()}/data/own.png", named):
        for split in ("train", "test"):
            cells = {"image": [{"bytes": None, "path": path}] * 2, "label": [0, 1]}
            pq.write_table(pa.table(cells, schema=schema), f"data/{split}.parquet")
        if path != named:
            assert len(load_images(ImageDataConfig(source="data"), 1).train) == 2
            continue
        with pytest.raises(UserError) as caught:
            load_images(ImageDataConfig(source="data"), 1)
        shown = named if "://" in named else f"{Path.cwd()}/secret.png"
        sentence = f"data.source data holds a link out of it or names a file there, {shown}: give that in data.files"
        assert str(caught.value) == sentence and requests[1:] == []


def test_links_that_lead_out_are_refused_except_in_the_cache_of_the_hub() -> None:
    Path("data/rows.csv").symlink_to("../secret.csv")
    assert refusal() == (
        f"data.source data holds a link out of it or names a file there, {Path.cwd()}/secret.csv: give that in data.files"
    )
    write("datasets--x/blobs/0123")
    write("datasets--x/snapshots/0a/README.md", "")
    Path("datasets--x/snapshots/0a/rows.csv").symlink_to("../../blobs/0123")
    assert texts("datasets--x/snapshots/0a") == ["a row"]
    Path("linked").symlink_to("datasets--x/snapshots/0a")
    assert texts("linked") == ["a row"]
    (Path("more") / "in").mkdir(parents=True)
    write("more/rows.csv")
    Path("more/in/again").symlink_to(Path.cwd())
    assert split_line("more") == "more: split train is rows.csv; left out: in/again"


def test_code_beside_the_files_is_not_run() -> None:
    write("data/rows.csv")
    write("data/rows.py", "raise SystemExit('run')\n")
    assert texts() == ["a row"]
    Path("data/rows.py").rename("data/data.py")
    assert "Dataset scripts are no longer supported, but found data.py" in refusal()


@pytest.mark.parametrize(
    "file", ["https://x.org/a.csv", "hf://datasets/other/set@0/a.csv", "zip://a::https://x.org/a.zip", "/a.csv"]
)
def test_a_hub_dataset_reads_its_own_repository_only(file: str) -> None:
    def check(*files: str, base: str = "hf://datasets/me/set@0a/") -> None:
        builder: Any = SimpleNamespace(base_path=base, config=SimpleNamespace(data_files={"train": files}))
        _check_files(builder, "me/set", None)

    check("hf://datasets/me/set@0a/a.csv", "zip://*.csv::hf://datasets/Me/set@refs%2Fconvert/a.zip")
    check("hf://buckets/me/set/a.csv", base="hf://buckets/me/set")
    with pytest.raises(UserError, match="data.source me/set names a file outside of it in its README, "):
        check("hf://datasets/me/set@0a/a.csv", file)
