"""A process of `generate_memory`: `generate FOLDER` for the rows of a file and watched, or a tokenizer over the same rows."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import memory_gib

POINTS = (10_000, 50_000, 100_000, 200_000)


def generate(folder: Path) -> None:
    """Runs the command, and writes what it took into `rank-N.json`."""
    from toolkit.distributed.comm import rank
    from toolkit.tools.generate import files
    from toolkit.tools.generate import generate as command
    from toolkit.tools.main import main

    seen: dict[str, Any] = {"points": []}
    num_rows = 0

    def note(name: str, function: Callable[..., Any], *, before: bool = False) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if before:
                seen.setdefault(name, time.monotonic())
            result = function(*arguments, **options)
            seen.setdefault(name, time.monotonic())
            return result

        return noted

    def generate_window(generator: Any, rows: list[dict[str, Any]], batch_size: int) -> list[str]:
        nonlocal num_rows
        texts = plain(generator, rows, batch_size)
        num_rows += len(rows)
        if len(seen["points"]) < len(POINTS) and num_rows >= POINTS[len(seen["points"])]:
            seen["points"].append({"num_rows": num_rows, "resident_mib": memory_gib("VmRSS") * 1024})
        return texts

    plain: Callable[..., list[str]] = command._generate_window
    command._generate_window = generate_window
    command.append_texts = note("first", command.append_texts)
    command.open_rows = note("checked", command.open_rows)
    files.read_rows = note("start", files.read_rows, before=True)
    sys.argv = ["toolkit", "generate", str(folder / "model"), "--file", str(folder / "rows.jsonl"), "--output"]
    sys.argv.append(str(folder / "out.jsonl"))
    own_rank: list[int] = []
    command.release = lambda release=command.release: (own_rank.append(rank()), release())
    main()
    start = seen.get("start", 0.0)
    seen |= {f"{name}_s": seen.get(key, start) - start for name, key in (("first_text", "first"), ("checked", "checked"))}
    seen |= {"all_s": time.monotonic() - start, "peak_mib": memory_gib("VmHWM") * 1024}
    (folder / f"rank-{own_rank[0]}.json").write_text(json.dumps(seen))


def make_tokens(folder: Path, side: str) -> None:
    """Prints how many rows become tokens in a second of the processor."""
    from itertools import islice
    from unittest.mock import patch

    from toolkit.tools.generate import files, model

    if side == "generate":
        generator = model.open_model(str(folder / "model"))
        generator.model.generation_config.max_new_tokens = 4
        options = files.Options(
            model="", file=str(folder / "rows.jsonl"), texts=[], column=None, plain=False, output=None,
            batch_size_rows=None, dtype=None, settings={},
        )  # fmt: skip
        with patch.object(files, "sum", lambda _: 1, create=True):  # rows are read once here, as the other side reads them
            rows, _ = files.open_rows(options, generator.usage)
        start = time.process_time()
        num_rows, given = 0, files.read_prompts(rows)
        while window := list(islice(given, 4096)):
            num_rows += len(generator.encode(window, plain=False))
    else:
        import datasets
        from transformers import AutoTokenizer

        datasets.disable_caching()
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        start, cache = time.process_time(), str(folder / f"cache-{time.monotonic()}")
        loaded: Any = datasets.Dataset.from_json(str(folder / "rows.jsonl"), cache_dir=cache)
        num_rows = len(loaded.map(lambda rows: tokenizer(rows["text"]), batched=True, batch_size=1000))
    print(json.dumps({"rows_per_s": num_rows / (time.process_time() - start)}))


if __name__ == "__main__":
    way, place = sys.argv[1], Path(sys.argv[2])
    if way == "generate" and "RANK" in os.environ:
        generate(place)
    else:
        make_tokens(place, way)
