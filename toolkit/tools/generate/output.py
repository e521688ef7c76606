"""The file that `generate` writes: lines of `row` (from 1) and `prediction`. It only grows, and the same command continues it.

out.jsonl              the texts
out.jsonl.unfinished   until all are there: a hash of what they are generated with, then of the rows up to each write
out.jsonl.lock         held by the process that writes them
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from toolkit.errors import UserError, escape_controls, refusal_named
from toolkit.files.durable import fsync_path, written_beside
from toolkit.files.json_lines import encode_json_line, read_json_lines
from toolkit.files.lock import release_lock, take_lock
from toolkit.launch.same_run import describe_files
from toolkit.models.lora_files import CONFIG_FILE
from toolkit.tools.generate.inputs import Options
from toolkit.tools.generate.model import find_folder, read_base_name

UNFINISHED = ".unfinished"
LOCK = ".lock"


def begin_output(options: Options) -> int:
    """Lock the output; returns the number of texts that an earlier, unfinished call has written. A torn last line is removed. An
    output that another process writes, that is not an unfinished one of this call, or cannot be written, is a `UserError`."""
    output = options.output
    assert output is not None
    about, lock = _beside(output, UNFINISHED), _beside(output, LOCK)
    try:
        take_lock(lock, f"another process is writing --output {output}: wait for its end, or name another file")
        mine = _digest(options)
        if output.exists():
            if not about.exists() or about.read_text(encoding="utf-8").partition("\n")[0] != mine:
                raise UserError(f"--output {output} exists, and is not what this command left unfinished: name another file")
            return _num_written(output)
        with written_beside(about) as beside:
            beside.write_text(f"{mine}\n", encoding="utf-8")
        output.touch()
        fsync_path(output.absolute().parent)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): name a file that you can write") from None
    except UserError:
        release_lock(lock, remove=True)
        raise
    return 0


def append_texts(output: Path | None, first: int, texts: list[str], digest: str) -> None:
    """Write the texts of rows `first` (from 0) and on, and the digest of all rows up to the last of these texts. They are on the
    disk when this returns. Without an output, print the texts."""
    if output is None:
        for text in texts:
            print(escape_controls(text), flush=True)
        return
    lines = [{"row": number, "prediction": text} for number, text in enumerate(texts, start=first + 1)]
    with refusal_named(f"--output {output} cannot be written", "make room, and give the same command again"):
        with output.open("r+b") as file:  # not made again, without its first lines, if it was removed
            file.seek(0, os.SEEK_END)
            file.write(b"".join(map(encode_json_line, lines)))
            file.flush()
            os.fsync(file.fileno())
        with _beside(output, UNFINISHED).open("a", encoding="utf-8") as about:
            about.write(f"{first + len(texts)} {digest}\n")


def read_notes(output: Path) -> dict[int, str]:
    """The digests of rows that texts were written for, by their number; a torn line is left out."""
    notes = re.findall(r"^(\d+) ([0-9a-f]{64})$", _beside(output, UNFINISHED).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {int(num_rows): digest for num_rows, digest in notes}


def end_output(output: Path) -> None:
    """All texts are written: nothing continues the output any more."""
    _beside(output, UNFINISHED).unlink(missing_ok=True)
    release_lock(_beside(output, LOCK), remove=True)


def _num_written(output: Path) -> int:
    with output.open("r+b") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))  # only the last line can lack its end
    num, way_out = 0, "remove this line and all after it, and give the same command again"
    for line, value in read_json_lines(output, way_out=way_out):
        num += 1
        if not isinstance(value, dict) or value.get("row") != num:
            raise UserError(f"{output}, line {line}: not row {num}: {way_out}")
    return num


def _digest(options: Options) -> str:
    """A hash of what decides the texts beside the rows: settings, and the files of the model and, for an adapter, of its base."""
    folder = Path(find_folder(options.model))
    folders = [folder, Path(read_base_name(folder))] if (folder / CONFIG_FILE).is_file() else [folder]
    settings = {**dataclasses.asdict(options), "output": None, "batch_size_rows": None, "file": None}
    return hashlib.sha256(json.dumps([settings, [*map(describe_files, folders)]], default=str).encode()).hexdigest()


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(output.name + ending)
