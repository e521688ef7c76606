"""A demo run beside what needs no model: ROUGE of its last texts on the rows that were held out, and five of the texts.

    python -m benchmarks.demo t5 runs/t5_functions
    python -m benchmarks.demo llm runs/llm_functions

The baselines: the first line of the source (the `def` line), the whole source, the function's name in words, the best constant,
and the target of the nearest training row: the largest cosine of the words of both sources, weighted by their rarity.
The five texts are those of rows 0, 1/5, 2/5, 3/5 and 4/5 of the way through the evaluation rows.
"""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measuring import format_table

NUM_TEXTS = 5
MAX_FREQUENCY = 0.2
"""A word of more of the training rows than this share finds no candidates; it counts in the cosine's length only."""


def main() -> None:
    from toolkit.config.python import load_config
    from toolkit.data.rows.load import load_rows
    from toolkit.evaluation.rouge import mean_scores, rouge_scores
    from toolkit.files.json_lines import load_json_lines
    from toolkit.objectives import objective_of
    from toolkit.tracking.baselines import best_constant

    task, folder = sys.argv[1], Path(sys.argv[2])
    config = load_config(task, folder / "config.yaml")
    rows = load_rows(objective_of(config), config.data)
    of_row = {row["row_id"]: row for row in rows.evaluation}
    last = max(folder.glob("predictions-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    predicted = load_json_lines(last)
    chosen = [of_row[line["row_id"]] for line in predicted]
    references = [row["completion"] for row in chosen]
    assert references == [line["reference"] for line in predicted], "these are not the run's rows"

    nearest = index_sources(rows.train["prompt"][:])
    targets = rows.train["completion"][:]
    constant = best_constant(targets, references)
    texts = {
        "the run": [line["prediction"] for line in predicted],
        "first line": [row["lead_text"] for row in chosen],
        "whole source": [row["prompt"] for row in chosen],
        "name in words": [
            " ".join(re.findall(r"[^\W_]+", row["lead_text"].partition("(")[0].removeprefix("def "))) for row in chosen
        ],
        f'constant "{constant}"': [constant] * len(chosen),
        "nearest training row": [targets[nearest(row["prompt"])] for row in chosen],
    }
    scores = {name: mean_scores(rouge_scores(of_name, references)) for name, of_name in texts.items()}
    equal = {name: sum(map(str.__eq__, of_name, references)) for name, of_name in texts.items()}
    header = ["", "ROUGE-1", "ROUGE-2", "ROUGE-L", f"equal, of {len(chosen)}"]
    print(f"{folder}, {last.name}, {len(chosen)} evaluation rows, {len(targets):,} training rows\n")
    print(
        format_table(
            header,
            [
                [name, *(f"{mean[key]:.1f}" for key in ("rouge1", "rouge2", "rougeL")), str(equal[name])]
                for name, mean in scores.items()
            ],
        )
    )
    best = max(mean["rougeL"] for name, mean in scores.items() if name != "the run")
    print(f"\nROUGE-L of the run is {scores['the run']['rougeL'] / best:.2f} times that of the best baseline.")
    for place in range(0, len(chosen), math.ceil(len(chosen) / NUM_TEXTS)):
        written = predicted[place]["prediction"]
        print(f"\n{chosen[place]['prompt'].strip()}\n    written:   {written}\n    reference: {references[place]}")


def index_sources(sources: Sequence[str]) -> Callable[[str], int]:
    """A function from a text to the place of the nearest of the `sources`; the first of equals, 0 if no word is shared."""
    of_sources = [set(re.findall(r"[^\W_]+", text.lower())) for text in sources]
    frequency = Counter(word for words in of_sources for word in words)
    weight = {word: math.log(len(sources) / count) for word, count in frequency.items()}
    lengths = [math.sqrt(math.fsum(weight[word] ** 2 for word in words)) or 1.0 for words in of_sources]
    places = defaultdict(list)
    for place, words in enumerate(of_sources):
        for word in words:
            if frequency[word] <= MAX_FREQUENCY * len(sources):
                places[word].append(place)

    def find(text: str) -> int:
        products: dict[int, float] = defaultdict(float)
        for word in sorted(set(re.findall(r"[^\W_]+", text.lower()))):
            for place in places.get(word, ()):
                products[place] += weight[word] ** 2
        return min(products, key=lambda place: (-products[place] / lengths[place], place), default=0)

    return find


if __name__ == "__main__":
    main()
