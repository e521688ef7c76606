"""Try every kind of causal model and encoder-decoder that transformers has, and write the second table of docs/support.md:
`make families`, or for some kinds only `python -m tests.families.survey bloom mamba`. It exits with 1 if one fails or was better.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

from tests.families.kinds import OTHERS, has_experts, kinds, save_kind
from tests.families.page import FAILS, SURVEY_COLUMNS, YES
from tests.families.table import SURVEY, launch_cell, library_versions, record, recorded, run_each, save_rows
from tests.support.launch import run_on_ranks
from tests.support.workbench import FP32

TIMEOUT_S = 240.0
"""Of a cell."""


def main() -> None:
    possible = [kind for kind in kinds() if all(kind not in others for others in OTHERS.values())]
    chosen = sys.argv[1:] or possible
    before, start = recorded()[1]["kinds"], time.monotonic()
    about, others = {"versions": library_versions(), "possible": possible}, before if sys.argv[1:] else {}
    found = record(SURVEY, about, "kinds", others, possible, run_each(chosen, survey))
    cells = [(kind, cell, outcome) for kind in chosen for cell, outcome in found[kind].items()]
    failed = [f"{kind} {cell}" for kind, cell, outcome in cells if outcome.startswith(FAILS)]
    worse = [f"{kind} {cell}" for kind, cell, outcome in cells if outcome != YES == before.get(kind, {}).get(cell)]
    print(f"{len(chosen)} kinds, {time.monotonic() - start:.0f} s; fail: {failed}; were better: {worse}")
    sys.exit(1 if failed or worse else 0)


def survey(kind: str) -> dict[str, str]:
    """The outcome of each cell of a kind; one alone, `plain`, if plain transformers does not run it."""
    outcomes, is_causal = {}, kinds()[kind] != "AutoModelForSeq2SeqLM"
    with tempfile.TemporaryDirectory(prefix="survey-") as scratch:
        folder = Path(scratch)
        try:
            run_on_ranks(save_and_try, preset="single", overrides=FP32, args=(folder, kind), timeout_s=TIMEOUT_S)
        except Exception as error:
            print(f"{kind} plain: {error!r}", flush=True)
            return {"plain": f"plain transformers: {type(error).__name__}: {error}".splitlines()[0][:200]}
        columns = [column for column in SURVEY_COLUMNS if is_causal or "packed" not in column]
        for cell in [column for column in columns if column != "experts" or has_experts(kind)]:
            start = time.monotonic()
            outcome = launch_cell(folder, kind, cell, preset="single", is_causal=is_causal, timeout_s=TIMEOUT_S)
            print(f"{kind} {cell}: {outcome} ({time.monotonic() - start:.1f} s)", flush=True)
            errors = re.findall(r"^\w*Error: .*", outcome, re.MULTILINE)  # of a traceback, the last says what it was
            short = errors[-1] if errors else outcome.removeprefix(FAILS).removeprefix("error: ").splitlines()[0]
            outcomes[cell] = f"{FAILS}{short[:200]}" if outcome.startswith(FAILS) else outcome
    return outcomes


def save_and_try(folder: Path, kind: str) -> None:
    """Write the tiny model and the rows; plain transformers reads the model again, and runs it forward and backward."""
    import torch

    from tests.families.plain import load_base

    save_rows(folder, is_causal=kinds()[kind] != "AutoModelForSeq2SeqLM")
    model = save_kind(kind, folder / "model")
    again = load_base(folder / "model", torch.float32).state_dict()
    if wrong := [name for name, value in model.state_dict().items() if not torch.equal(value, again[name])]:
        raise ValueError(f"{wrong[0]} is not read from the folder that `save_pretrained` wrote")
    tokens = torch.randint(3, 256, (2, 12))
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, use_cache=False).loss.backward()


if __name__ == "__main__":
    main()
