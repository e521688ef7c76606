"""What the tests of bad input share: a working run, a case that makes one thing of it wrong, and the sentence it must print."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launch import TIMEOUT_S, LaunchResult, launch
from tests.support.workbench import RECIPES

NUM_ROWS = 24
T5 = {
    "model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 64,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROWS = "".join(
    json.dumps({"source": f"alpha {'beta ' * (1 + i % 5)}gamma {i:b}", "target": f"beta {i:b}"}) + "\n" for i in range(NUM_ROWS)
)
_TEXTS = (
    "--model.name_or_path {here}/model --data.source jsonl --data.files {here}/rows.jsonl --data.cache_dir {here}/cache "
    "--data.eval_fraction 0 --run.output_dir {here}/runs --train.max_steps 2 --train.global_batch_size_rows 4 "
    "--train.micro_batch_size_rows 2 --eval.generate false "
)
FLAGS = {
    "t5": _TEXTS + "--data.max_source_length_tokens 60 --data.max_target_length_tokens 30",
    "llm": _TEXTS + "--data.max_length_tokens 100",
    "mnist": "--train.max_steps 2 --run.output_dir {here}/runs --data.source idx --data.folder {here}",
}
"""Of the working run of a recipe. Its model folder has a config and neither weights nor a tokenizer."""

Files = dict[str, str | bytes | Callable[[], bytes]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One wrong thing. `{here}` stands for the case's folder."""

    flags: str = ""
    """In place of those of the working run with the same name, or beside them; separated by blanks."""
    sentence: str = ""
    """What is printed, whole, where `…` stands for anything."""
    files: Files = field(default_factory=dict)
    """Written into the folder beside (or over) those of the working run."""
    overrides: dict = field(default_factory=dict)
    recipe: str = "t5"


def write(here: Path, files: Files) -> None:
    for name, content in {"model/config.json": json.dumps(T5), **files}.items():
        made = content() if callable(content) else content
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made if isinstance(made, bytes) else made.encode())


def attempt(here: Path, case: Case) -> LaunchResult:
    """The recipe on 2 ranks in the folder `here`, with what is wrong in `case`."""
    script = RECIPES / f"{case.recipe}.py"
    return launch(script, arguments(here, case), preset="fsdp2_cpu", overrides=case.overrides, timeout_s=TIMEOUT_S)


def arguments(here: Path, case: Case) -> list[str]:
    write(here, case.files)
    values = _pairs(FLAGS[case.recipe]) | _pairs(case.flags)
    return [fill(word, here) for pair in values.items() for word in pair]


def _pairs(flags: str) -> dict[str, str]:
    words = flags.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def check(here: Path, case: Case, result: LaunchResult) -> None:
    pattern = ".+".join(re.escape(fill(part, here)) for part in case.sentence.split("…"))
    assert re.fullmatch(pattern, result.refusal()), f"{result.refusal()}\nis not\n{case.sentence}"


def fill(text: str, here: Path) -> str:
    return text.replace("{here}", str(here))


def contents(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
