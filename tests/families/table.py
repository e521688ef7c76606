"""Run every cell of the support table, and write docs/support.md: `make support`, or for some families only
`python -m tests.families.table llama t5`. It exits with 1 if a cell fails.
"""

import datetime
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from tests.families.cell import run_cell
from tests.families.families import ENCODER_DECODERS, FROZEN, NUM_STEPS, OPTIM, SETTINGS, TITLES, save_model
from tests.families.page import PACKED, REASONS, REFUSED, YES, is_known, render
from tests.support.launch import REPOSITORY, TIMEOUT_S, run_on_ranks, start_on_ranks
from tests.support.model_folders import LANGUAGES, make_rows, save_jsonl
from tests.support.workbench import FP32

Cells = dict[str, dict[str, str]]
"""By family or kind, the outcome of each cell."""
RESULTS = REPOSITORY / "tests" / "families" / "results.json"
SURVEY = REPOSITORY / "tests" / "families" / "survey.json"
PAGE = REPOSITORY / "docs" / "support.md"
LORA = {"adapter.method": "lora", "adapter.rank": 4, "adapter.alpha": 8}
KINDS = {"full": {}, "lora": LORA, "nf4": LORA | {"adapter.base_dtype": "nf4"}, "experts": LORA | {"adapter.experts": True}}
"""Settings by what is trained; adapters on experts in the survey only."""
NUM_ROWS = 8
LIBRARIES = ("torch", "accelerate", "transformers", "peft")


def cells_of(family: str) -> list[str]:
    """`full`, `full-packed`, … Of an encoder-decoder, whose rows are never packed, one cell asks for it."""
    kinds = [kind for kind in KINDS if kind != "experts"]
    kinds_packed = kinds if family not in ENCODER_DECODERS else ("full",)
    return [*kinds, *(kind + PACKED for kind in kinds_packed)]


def main() -> None:
    families, start = sys.argv[1:] or list(TITLES), time.monotonic()
    about = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "versions": library_versions()}
    before = recorded()[0] if families != list(TITLES) else about | {"cells": {}}  # the rest stays as it was found
    if before["versions"] != about["versions"]:
        sys.exit(f"the other families were run with {before['versions']}: run all with these versions, {about['versions']}")
    found = before["cells"] | record(RESULTS, about, "cells", before["cells"], list(TITLES), run_each(families, run_family))
    num_failed = sum(not is_known(outcome) for cells in found.values() for outcome in cells.values())
    print(f"{sum(map(len, found.values()))} cells, of which {num_failed} fail; {time.monotonic() - start:.0f} s")
    sys.exit(1 if num_failed else 0)


def record(path: Path, about: dict, key: str, before: Cells, names: list[str], running: Iterator[tuple[str, dict]]) -> Cells:
    """Write what each comes to, under `key` and in the order of `names`, beside what others came to before; and then the page."""
    found: Cells = {}
    for name, outcomes in running:
        found[name] = outcomes
        in_order = {name: (before | found)[name] for name in names if name in before | found}
        path.write_text(json.dumps(about | {key: in_order}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(*recorded()), encoding="utf-8")
    return found


def recorded() -> list[dict]:
    """What the files of results have: the table's, and the survey's."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, SURVEY)]


def run_each(names: list[str], run: Callable[[str], dict[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    """What each comes to, two at a time: ranks that wait for each other leave a core idle."""
    run_on_ranks(int, preset="single", overrides=FP32)  # starts the server that ranks are forked from, before threads
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run, name): name for name in names}
        for future in as_completed(running):
            yield running[future], future.result()


def library_versions() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES} | {"python": platform.python_version()}


def run_family(family: str, cells: list[str] | None = None) -> dict[str, str]:
    """The outcome of each cell: yes, refused for a reason, or a failure in full, which is also printed."""
    outcomes = {}
    cells = cells or cells_of(family)
    with tempfile.TemporaryDirectory(prefix="support-") as scratch:
        folder = Path(scratch)
        run_on_ranks(prepare, preset="single", overrides=FP32, args=(folder, family))
        for cell in cells:
            start = time.monotonic()
            outcomes[cell] = launch_cell(folder, family, cell, is_causal=family not in ENCODER_DECODERS)
            print(f"{family} {cell}: {outcomes[cell]} ({time.monotonic() - start:.1f} s)", flush=True)
    return outcomes


def prepare(folder: Path, family: str) -> None:
    save_rows(folder, is_causal=family not in ENCODER_DECODERS)
    save_model(family, folder / "model")


def save_rows(folder: Path, *, is_causal: bool) -> None:
    for name, num_rows, seed in (("rows.jsonl", NUM_ROWS, 1), ("held_out.jsonl", NUM_ROWS // 2, 2)):
        rows = make_rows(num_rows, seed=seed)
        if is_causal:
            rows = [{"prompt": row["source"], "completion": " " + row["target"]} for row in rows]
        save_jsonl(folder / name, rows)


def launch_cell(
    folder: Path, family: str, cell: str, *, is_causal: bool, preset: str = "fsdp2_cpu", timeout_s: float = TIMEOUT_S
) -> str:
    """The outcome of one cell, on two ranks, or on one for the preset `single`."""
    settings = settings_of(folder, family, cell, is_causal=is_causal)
    args = (family, "llm" if is_causal else "t5", settings, folder, cell.removesuffix(PACKED))
    with start_on_ranks(run_cell, preset=preset, overrides=FP32, args=args) as running:
        try:
            ended = running.wait(timeout_s)
        except AssertionError as error:
            return f"FAILS: {error}"
        refusals = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        if set(ended.returncodes) == {2} and refusals:
            reasons = [reason for reason, (words, _) in REASONS.items() if words in refusals[0]]
            return f"{REFUSED}{reasons[0]}" if len(reasons) == 1 else f"FAILS: {refusals[0]}"
        try:
            wrong = running.results()[0]
        except Exception as error:
            return "FAILS: " + "".join(traceback.format_exception(error))[-3000:]
    return f"FAILS: {wrong}" if wrong else YES


def settings_of(folder: Path, family: str, cell: str, *, is_causal: bool) -> dict:
    """Of the run YAML, by their dotted keys."""
    kind = cell.removesuffix(PACKED)
    settings = {
        "model.name_or_path": folder / "model",
        "model.dropout": 0,
        "model.freeze": [f".*{FROZEN[family]}.*"] if family in FROZEN and kind == "full" else [],
        "data.source": "jsonl",
        "data.files": str(folder / "rows.jsonl"),
        "data.cache_dir": folder / "cache",
        "data.eval_files": str(folder / "held_out.jsonl"),
        "eval.at_start": False,
        "eval.max_new_tokens": 4,
        "train.max_steps": NUM_STEPS,
        "train.global_batch_size_rows": NUM_ROWS,
        "train.micro_batch_size_rows": 2,
        "checkpoint.every_steps": NUM_STEPS - 1,
        "log_every_steps": 1,
        "run.output_dir": folder / "runs",
        "run.name": cell,
        **OPTIM,
        **KINDS[kind],
        **SETTINGS.get(family, {}),
    }
    if is_causal:
        settings |= {"data.packing": "auto" if kind == "experts" else cell.endswith(PACKED), "data.max_length_tokens": 96}
    elif cell.endswith(PACKED):
        settings["data.packing"] = True
    if family in LANGUAGES:
        settings["data.source_language"], settings["data.target_language"] = LANGUAGES[family]
    return settings


if __name__ == "__main__":
    main()
