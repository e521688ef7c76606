"""docs/support.md, made of the results of the support table; and the reasons for which a cell may be refused."""

import re
from collections.abc import Sequence

from tests.families.families import CAUSAL, ENCODER_DECODERS, EXPERTS
from tests.families.kinds import OTHERS

PACKED = "-packed"
YES, REFUSED = "yes", "refused: "
REASONS: dict[str, tuple[str, str]] = {
    "two sequences": (
        "unknown flag --data.packing",
        "a row of an encoder-decoder is two sequences: it has no `data.packing`",
    ),
    "no packing": (
        "lets packed rows see each other",
        "packed rows would see each other, since the family's code hands its masks no positions, or compresses blocks of "
        "tokens; with `data.packing: auto`, the default, it trains on rows that are not packed",
    ),
    "not causal": (
        "its tokens see later ones",
        "its tokens see later ones, also in texts to be continued",
    ),
    "tied layers": (
        "which is one tied weight with",
        "layers share their weights, and an adapter on one would not be on the other",
    ),
    "not read by peft": (
        "that peft would not read from its file again",
        "transformers renames weights of older files, and with them layers of this family in peft's: leave these out",
    ),
    "separate experts": (
        "experts as separate modules",
        "experts are modules of their own, of which a rank runs only those that its tokens are routed to",
    ),
    "not loaded in slices": (
        "can only be loaded in full",
        "transformers computes a weight that is in no file, and weights are quantized while they are read in slices",
    ),
    "experts of its own": (
        "has no experts that transformers computes",
        "no adapters on experts (`adapter.experts`), which code of the family's own computes",
    ),
    "no linear layers": (
        "has a number of inputs that 64 divides",
        "its layers are `Conv1D`, which are not quantized",
    ),
}
"""The closed list, by its short name: words of the error, and what it means."""
COLUMNS = {
    "full": "full", "full-packed": "full, packed", "lora": "LoRA", "lora-packed": "LoRA, packed", "nf4": "4-bit",
    "nf4-packed": "4-bit, packed", "experts": "LoRA, experts",
}  # fmt: skip
"""Heads of the columns, by cell."""
SURVEY_COLUMNS = ("full", "full-packed", "lora", "lora-packed", "experts")
FAILS, LOSSES_DIFFER = "FAILS: ", "losses differ from plain ones by "
MOST_CHARACTERS = 100
"""Of a cause on the page; the results have it in full."""
GROUPS = {"Encoder-decoders": ENCODER_DECODERS, "Causal models": CAUSAL, "Mixtures of experts": EXPERTS}
HEADER = """# Which families are supported

Look here for your model's family before you choose how to train it. `make support` writes this page: it runs every cell on two
CPU processes under FSDP2, and fails if one neither passes nor is refused for one of [these reasons](#reasons).
{num_cells} cells: {num_yes} yes, {num_refused} refused.
{date}: {versions}.

A cell says **yes** if a tiny random model of the family, in fp32:

- trains three steps, whose losses are to 1e-5 those of plain transformers (with LoRA also peft) on one process, a row at a time
  in fp64;
- repeats the third step from the checkpoint after the second, bit for bit;
- is exported, and plain transformers (with LoRA also peft) loads the export with the same logits, to 1e-4 of the largest.

**full** trains all weights. **LoRA** adapts all linear layers (`adapter.target_modules: all-linear`). **4-bit** is LoRA on a base
in NF4 codes (`adapter.base_dtype: nf4`), compared with a plain model of the codes' values. Experts are neither adapted nor
quantized here (`adapter.experts`: [adapters on experts](configuration.md#adapters-on-a-mixture-of-experts)).
**packed** puts several rows into one sequence (`data.packing: true`). [Guarantees](guarantees.md) names more families.
"""
NOTES = """ProphetNet needs `disable_ngram_loss: true` in its `config.json`, and its cells take one row at a time, because its
outputs depend on the padding.
"""


SURVEY_HEADER = """## Every kind of transformers

`make families` tries the kinds (`model_type`) that transformers maps to a causal model, an encoder-decoder, or a model of images
that continues texts (`AutoModelForImageTextToText`), on one process, with the same checks, and the loss of an evaluation beside
that of plain transformers: tiny models that plain transformers must run first.
{num_tried} of {num_kinds} have run, with {versions}; {num_trained} train in full. Not run: {untried}.
`-`: not a cell of an encoder-decoder, or of a model without experts. **LoRA, experts** adapts experts too (`adapter.experts`),
packed if the kind can be.
Some kinds have a tenth of the learning rate, with which rounding alone moves no loss by 1e-5. Phi-MoE draws its experts at random
in training: its model here has no jitter, and frozen routers. Youtu's has no padding token, whose row transformers sets to 0 at
each load: with one it is refused before its weights load.
"""
OTHERS_HEADER = """Not for text rows, and so not here: {others}.
"""


def is_known(outcome: str) -> bool:
    """Whether a cell passed, or was refused for one of `REASONS`."""
    return outcome == YES or outcome.removeprefix(REFUSED) in REASONS


def render(results: dict, survey: dict) -> str:
    """The page in Markdown, from what `table.py` and `survey.py` record."""
    cells, versions = results["cells"], results["versions"]
    outcomes = [outcome for of_family in cells.values() for outcome in of_family.values()]
    num_yes = outcomes.count(YES)
    parts = [
        HEADER.format(
            num_cells=len(outcomes),
            num_yes=num_yes,
            num_refused=len(outcomes) - num_yes,
            date=results["date"],
            versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        )
    ]
    for group, titles in GROUPS.items():
        columns = [column for column in COLUMNS if any(column in cells.get(family, {}) for family in titles)]
        found = {
            title: [_shown(cells.get(family, {}).get(column, "FAILS")) for column in columns] for family, title in titles.items()
        }
        parts.append(f"## {group}\n\n{_render_table('families', columns, found)}")
    parts.append(NOTES)
    outcomes += [outcome for of_kind in survey["kinds"].values() for outcome in of_kind.values()]
    reasons = [f"| {name} | {outcomes.count(REFUSED + name)} | {meaning} |\n" for name, (_, meaning) in REASONS.items()]
    parts.append("## Reasons\n\n| refused | cells | because |\n| --- | --- | --- |\n" + "".join(reasons))
    return "\n".join([*parts, *_render_survey(survey)])


def _render_survey(survey: dict) -> list[str]:
    found, possible = survey["kinds"], survey["possible"]
    header = SURVEY_HEADER.format(
        num_tried=len(found),
        num_kinds=len(possible),
        versions=f"transformers {survey['versions']['transformers']}",
        num_trained=sum(cells.get("full") == YES for cells in found.values()),
        untried=", ".join(kind for kind in possible if kind not in found) or "none",
    )
    notes: dict[str, int] = {}
    found_in = {
        kind: [_brief(cells.get(column, cells.get("plain", "-")), notes) for column in SURVEY_COLUMNS]
        for kind, cells in found.items()
    }
    causes = "".join(f"{number}. `{cause}`\n" for cause, number in notes.items())
    others = "; ".join(f"{reason} ({', '.join(kinds)})" for reason, kinds in OTHERS.items())
    table = _render_table("kinds", SURVEY_COLUMNS, found_in)
    return [
        header,
        table,
        *([f"Causes, of the kinds above in their order:\n\n{causes}"] if notes else []),
        OTHERS_HEADER.format(others=others),
    ]


def _brief(outcome: str, notes: dict[str, int]) -> str:
    """A cell of the survey; what else failed than the losses is in `notes`, by its beginning, with a number."""
    if is_known(outcome) or outcome == "-":
        return outcome
    if LOSSES_DIFFER in outcome:
        differences = outcome.partition(LOSSES_DIFFER)[2].split(", ")
        return f"fails: losses differ by {max(differences, key=float)}"
    cause = re.sub(r"/tmp/\S+|`", "…", outcome.removeprefix(FAILS)).partition("\n")[0][:MOST_CHARACTERS]
    return f"fails: cause {notes.setdefault(cause, len(notes) + 1)}"


def _render_table(head: str, columns: Sequence[str], outcomes: dict[str, list[str]]) -> str:
    """A row for all that have the same outcomes, in the order of the first of them."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in outcomes.items():
        names.setdefault(tuple(row), []).append(name)
    rows = [[head, *(COLUMNS[column] for column in columns)], ["---"] * (1 + len(columns))]
    rows += [[", ".join(named), *(cell.replace("|", "/") for cell in row)] for row, named in names.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown(outcome: str) -> str:
    """A failure in one word: the command prints it in full."""
    return outcome if is_known(outcome) else "**FAILS**"
