"""The image recipe: its config, and images from IDX files, hub datasets and scikit-learn. WikiHow files with the mess of the
real ones."""

import csv
import gzip
import struct
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from mnist_config import ImageDataConfig, MnistConfig, check_mnist_config
from mnist_images import IDX_FILES, load_images
from PIL import Image

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from toolkit.config.load import load_config
from toolkit.data.sources.own_function import run_file


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data.source=idx"], "data.source idx needs data.folder: give the folder that holds train-images-idx3-ubyte"),
        (["--data.folder=here"], "data.folder is here, which only data.source idx reads: data.source is digits"),
        (["--train.max_steps=null"], "give train.max_steps or train.num_epochs, one of them: neither is given"),
        (["--optim.beta1=0.5"], "unknown flag --optim.beta1; known are --optim.lr, --optim.gamma, --optim.label_smoothing"),
        (["--model.conv_dropout=2"], "--model.conv_dropout is 2: give a number from 0 to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, sentence):
    assert refusal(load_config, MnistConfig, ["--train.max_steps=3", *flags], check=check_mnist_config) == sentence


CPU = torch.device("cpu")


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def save_idx(folder: Path, num_train: int = 5, num_held_out: int = 3, side: int = 7, *, zipped: bool = False) -> dict:
    """The four files of MNIST with random pixels; returns the arrays by file name."""
    random = np.random.Generator(np.random.PCG64(0))
    folder.mkdir(exist_ok=True)
    arrays = {}
    for (images, labels), number in zip(IDX_FILES.values(), (num_train, num_held_out), strict=True):
        arrays |= {images: random.integers(0, 256, (number, side, side)), labels: np.arange(number) % 3}
    for name, array in arrays.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return arrays


def unread(config: ImageDataConfig, smallest_side: int = 6) -> str:
    """The sentence with which images are refused."""
    return refusal(load_images, config, smallest_side)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_as_they_are_or_zipped_into_batches_of_mean_0_and_deviation_1(tmp_path, zipped):
    arrays = save_idx(tmp_path, zipped=zipped)
    images = load_images(ImageDataConfig(source="idx", folder=str(tmp_path)), 6)
    for part, (pixels, labels) in zip((images.train, images.evaluation), IDX_FILES.values(), strict=True):
        np.testing.assert_array_equal(part.pixels_NHW, arrays[pixels])
        np.testing.assert_array_equal(part.labels_N, arrays[labels])
    assert (images.train.pixels_NHW.dtype, images.train.labels_N.dtype, images.num_classes) == (torch.uint8, torch.int64, 3)
    assert len(load_images(ImageDataConfig(source="idx", folder=str(tmp_path), num_rows=4), 6).train) == 4
    pixels, labels = images.collate(images.train, range(5), CPU, is_dummy=False)
    assert pixels.shape == (5, 1, 7, 7) and pixels.dtype == torch.float32 and labels.tolist() == [0, 1, 2, 0, 1]
    assert pixels.mean().item() == pytest.approx(0, abs=1e-5) and pixels.std().item() == pytest.approx(1, abs=1e-5)
    pixels, labels = images.collate(images.train, [3, 1], CPU, is_dummy=True)
    assert labels.tolist() == [-100, -100], "labels of rows that do not count"
    raw = images.train.pixels_NHW[3].double()
    np.testing.assert_allclose(pixels[0, 0], (raw - images.mean) / images.std, rtol=1e-5)


def test_digits_come_with_scikit_learn_and_are_held_out_by_place():
    some, more = (load_images(ImageDataConfig(eval_fraction=share), 6) for share in (0.2, 0.3))
    assert len(some.train) + len(some.evaluation) == 1797 and 300 < len(some.evaluation) < 420
    assert some.num_classes == 10 and tuple(some.train.pixels_NHW.shape[1:]) == (8, 8)
    held_out = [{image.numpy().tobytes() for image in images.evaluation.pixels_NHW} for images in (some, more)]
    assert held_out[0] < held_out[1], "raising the share moves no image back"
    assert not held_out[0] & {image.numpy().tobytes() for image in some.train.pixels_NHW}


def test_what_is_wrong_with_idx_files(tmp_path):
    config = ImageDataConfig(source="idx", folder=str(tmp_path))
    save_idx(tmp_path)
    images, labels = (tmp_path / name for name in IDX_FILES["training"])
    whole = images.read_bytes()
    for content, sentence in (
        (whole[:-1], "holds 244 bytes behind its header, not 245: get it again"),
        (labels.read_bytes(), "starts with 00000801, an IDX file of 3 dimensions with 00000803: get the file again"),
        (b"", "starts with nothing, an IDX file of 3 dimensions with 00000803: get the file again"),
    ):
        images.write_bytes(content)
        assert unread(config) == f"{images} {sentence}"
    images.write_bytes(whole)
    labels.write_bytes(idx(np.zeros(4)))
    assert unread(config) == f"{images} holds 5 images, but {labels.name} 4 labels: take both files from one place"
    labels.unlink()
    assert unread(config) == f"data.folder {tmp_path} has neither {labels.name} nor {labels.name}.gz: check the path"
    (tmp_path / f"{labels.name}.gz").write_bytes(gzip.compress(idx(np.zeros(5)))[:-9])
    assert unread(config).startswith(f"{labels}.gz cannot be read (")
    nowhere = tmp_path / "nowhere"
    config = ImageDataConfig(source="idx", folder=str(nowhere))
    assert unread(config).startswith(f"data.folder {nowhere} is not a folder with train-images-idx3-ubyte or ")


def test_images_that_cannot_be_trained_on(tmp_path):
    config = ImageDataConfig(source="idx", folder=str(tmp_path))
    save_idx(tmp_path)
    assert unread(config, 8) == "data.source idx: images have 7 x 7 pixels, the convnet needs 8 x 8"
    held_out_images, held_out_labels = (tmp_path / name for name in IDX_FILES["held-out"])
    held_out_images.write_bytes(idx(np.zeros((3, 9, 7))))
    assert "training images have 7 x 7 pixels, held-out ones 9 x 7" in unread(config)
    held_out_images.write_bytes(idx(np.zeros((3, 7, 7))))
    held_out_labels.write_bytes(idx(np.array([0, 9, 1])))
    assert "class 9 is among the held-out images only" in unread(config)
    save_idx(tmp_path, num_held_out=0)
    assert "data.source idx has no held-out images" in unread(config)
    assert "data.source digits has no held-out images" in unread(ImageDataConfig(eval_fraction=0.0))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Writes a dataset folder whose images are these arrays; returns its config."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def save(arrays: list[np.ndarray], labels: list | None = None, **columns: str) -> ImageDataConfig:
        folder = tmp_path / f"dataset-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        pictures = [Image.fromarray(array.astype(np.uint8)) for array in arrays]
        values = {"image": pictures, "label": labels or list(range(len(arrays)))}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        for split in ("train", "test"):
            datasets.Dataset.from_dict(values, features=features).to_parquet(folder / f"{split}-0.parquet")
        return ImageDataConfig(source=str(folder), **columns)

    return save


def test_a_hub_dataset_gives_its_images_or_says_what_is_wrong_with_them(dataset):
    arrays = [np.full((6, 8), value) for value in (0, 100, 255)]
    images = load_images(dataset(arrays, [1, 0, 1]), 6)
    np.testing.assert_array_equal(images.train.pixels_NHW, np.stack(arrays))
    assert images.evaluation.labels_N.tolist() == [1, 0, 1] and images.num_classes == 2
    flat, colour = np.zeros((6, 8)), np.zeros((6, 8, 3))
    assert "split train, image 1 has the shape 6 x 8 x 3: only grayscale images" in unread(dataset([flat, colour]))
    assert "image 1 has 7 x 7 pixels, those before 6 x 8" in unread(dataset([flat, np.zeros((7, 7))]))
    assert "image 1: its label is None, not a whole number" in unread(dataset([flat, flat], [0, None]))
    assert "a training image has class -1" in unread(dataset([flat, flat], [0, -1]))
    no_column = "has no column 'digit' (its columns: image, label): set data.image_column"
    assert no_column in unread(dataset([flat], label_column="digit"))


wikihow, _ = run_file(REPOSITORY / "recipes" / "sources" / "wikihow.py", "wikihow")

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


def read_articles(file, *eval_files):
    """The rows that are kept, and the reasons to skip the others by their numbers."""
    rows = list(wikihow.load_rows(SimpleNamespace(files=[str(file)], eval_files=[*map(str, eval_files)])))
    skipped = {number: row["skip"] for number, row in enumerate(rows, start=1) if row["skip"]}
    return [row for row in rows if not row["skip"]], skipped


def article(subject):
    """A text long enough for any short headline."""
    return f" This text about {subject} is much longer than its headline is.\n\n, It goes on for a while, as articles do."


def write_all(path, rows, columns=("headline", "title", "text")):
    """`wikihowAll.csv` with rows of (headline, title, text); returns its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def test_article_is_cleaned(tmp_path):
    article = (ARTIST_HEADLINE, "How to Be an Organized Artist1", ARTIST_TEXT)
    [row], _ = read_articles(write_all(tmp_path / "wikihowAll.csv", [article]))
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
    for title in ("HowtoBeAnOrganizedArtist 2 ", "how to be an organized  artist"):
        assert wikihow.title_group(title) == row["group"]
    assert wikihow.clean_headline("\nWash the fruit,\nDry it;\n") == "Wash the fruit, Dry it"
    assert wikihow.clean_headline(";") == ""
    assert wikihow.clean_text("Stop; then look.;\n\n; \n, Go on.,") == "Stop; then look.\nGo on."


def test_sep_file_is_recognised_by_its_columns_and_another_refused(tmp_path):
    rows = [
        (" An overview,\nlong", "\nBuy a lens.", article("lenses"), "Steps", "How to Be a Photographer"),
        ("", "\nClean it.;", article("cleaning"), "", "How to Be a Photographer"),
    ]
    columns = ("overview", "headline", "text", "sectionLabel", "title")
    kept, skipped = read_articles(write_all(tmp_path / "wikihowSep.csv", rows, columns))
    assert [row["target"] for row in kept] == ["Buy a lens.", "Clean it."]
    assert not skipped  # a missing overview or label is not ours to judge
    with pytest.raises(ValueError, match=r"rows.csv has no column 'text' \(its columns: source, target\)"):
        read_articles(write_all(tmp_path / "rows.csv", [("a", "b")], ("source", "target")))


def test_unusable_rows_are_counted_by_reason(tmp_path):
    good, text = ("\nDo it.", "How to Do It", article("doing")), article("anything")
    # 100 characters with its line break as one, as Python's text mode reads it; blanks around a cell do not count.
    hundred = f" {'b' * 49}\r\n{'b' * 50}\r\n"
    rows = [
        (good, None),
        (("", "How to Have No Headline", text), "with an empty headline"),
        (("\r\n;", "How to Have Half a Headline", text), "with an empty headline"),
        (("\nDo this.", "How to Have No Text", ""), "with an empty text"),
        (("\nDo this.", "How to Have Almost No Text", " ;\n, "), "with an empty text"),
        (("\nDo this.", " ", text), "with an empty title"),
        (("only one cell",), "with too many or too few cells"),
        (("\nDo", "How to", text, "one more"), "with too many or too few cells"),
        ((f"\r\n{'a' * 75} ", "How to Be Long", hundred), "whose headline is not shorter than 0.75 of the text"),
        ((f"\r\n{'a' * 74} ", "How to Count", hundred), None),
        (("\nDo it.", "How to Do It2", article("doing")), "that repeat an earlier row"),
        (("\nDo it well.", "How to Do It", article("doing")), None),
    ]
    kept, skipped = read_articles(write_all(tmp_path / "wikihowAll.csv", [row for row, _ in rows]))
    assert [row["target"] for row in kept] == ["Do it.", "a" * 74, "Do it well."]
    assert skipped == {number: reason for number, (_, reason) in enumerate(rows, start=1) if reason}


def test_titles_and_texts_of_evaluation_files_are_kept_out_of_training(tmp_path):
    other_method = ("\nDo it again.", "how to do it2", article("doing it again"))
    same_text = ("\nMake it.", "How to Make It", article("doing"))
    held_out = write_all(tmp_path / "eval.csv", [("\nDo it.", "How to Do It", article("doing"))])
    trained = write_all(tmp_path / "train.csv", [other_method, same_text, ("\nRest.", "How to Rest", article("rest"))])
    kept, skipped = read_articles(trained, held_out)
    assert [(row["target"], row["split"]) for row in kept] == [("Do it.", "eval"), ("Rest.", "train")]
    assert skipped == dict.fromkeys([2, 3], "that are in data.eval_files too")
