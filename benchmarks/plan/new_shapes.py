"""Micro-batches whose shape is new to a rank, by quarter of an epoch, before and after lengths are padded to a grid.

python -m benchmarks.plan.new_shapes
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.measuring import build_parser, format_table, write_report
from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.data.collate import choose_multiples
from toolkit.training.data import NUM_STEPS_LOOKED_AT


@dataclass(frozen=True)
class Rows:
    """Log-normal lengths in tokens, cut; one a row and tensor."""

    name: str
    lengths: tuple[tuple[int, float, int], ...]
    """(median, sigma, longest) of sources and targets, or of a causal model's rows."""
    micro_batch_size_rows: int
    num_ranks: int


ROWS = (
    Rows("sources to 512, targets to 128 (t5_csv)", ((300, 0.6, 512), (40, 0.5, 128)), 8, 8),
    Rows("sources to 1,024, targets to 256", ((600, 0.7, 1024), (60, 0.5, 256)), 8, 2),
    Rows("sources to 96, targets to 48", ((60, 0.5, 96), (12, 0.4, 48)), 16, 1),
    Rows("rows to 2,048, a causal model's, not packed", ((400, 0.9, 2048),), 8, 8),
)
NUM_ROWS = 100_000
GLOBAL_BATCH_SIZE_ROWS = 64


@dataclass(frozen=True)
class Epoch:
    """What rank 0 meets in an epoch."""

    padding_share: float
    """Padding that the grid adds, of the tokens and the padding there were."""
    new_shares: list[float]
    """Share of its micro-batches that have a new shape, by quarter."""
    num_shapes: int


def draw(rows: Rows) -> list[np.ndarray]:
    """The length of each row in each tensor."""
    random = np.random.Generator(np.random.PCG64(0))
    return [np.exp(random.normal(np.log(m), s, NUM_ROWS)).astype(int).clip(4, longest) for m, s, longest in rows.lengths]


def shapes_of_an_epoch(rows: Rows, lengths: list[np.ndarray]) -> list[tuple[int, ...]]:
    """Shapes of rank 0's micro-batches, by the run's own batch plan."""
    train = TrainConfig(global_batch_size_rows=GLOBAL_BATCH_SIZE_ROWS, micro_batch_size_rows=rows.micro_batch_size_rows)
    plan = BatchPlan(np.sum(lengths, axis=0), lengths[-1], train, rows.num_ranks)
    return list(plan.shapes(tuple(lengths), plan.steps_per_epoch, 0))


def pad(shapes: list[tuple[int, ...]], multiples: tuple[int, ...], longest: list[int]) -> Epoch:
    """An epoch of these shapes, padded as the collators do."""
    num_before = num_after = 0
    seen: set[tuple[int, ...]] = set()
    is_new: list[bool] = []
    for num_rows, *lengths in shapes:
        grid = zip(lengths, multiples, longest, strict=True)
        padded = [max(length, min(-(-length // multiple) * multiple, most)) for length, multiple, most in grid]
        num_before, num_after = num_before + num_rows * sum(lengths), num_after + num_rows * sum(padded)
        is_new.append((shape := (num_rows, *padded)) not in seen)
        seen.add(shape)
    quarters = [float(quarter.mean()) for quarter in np.array_split(np.array(is_new), 4)]
    return Epoch(num_after / num_before - 1, quarters, len(seen))


def measure(rows: Rows) -> tuple[tuple[int, ...], Epoch, Epoch]:
    """The multiples that a run chooses by its first 100 steps, and an epoch without a grid and with it."""
    lengths = draw(rows)
    shapes, longest = shapes_of_an_epoch(rows, lengths), [int(counts.max()) for counts in lengths]
    num_per_step = -(-GLOBAL_BATCH_SIZE_ROWS // (rows.micro_batch_size_rows * rows.num_ranks))
    chosen = choose_multiples(shapes[: NUM_STEPS_LOOKED_AT * num_per_step], tuple(longest))
    return chosen, pad(shapes, (1,) * len(longest), longest), pad(shapes, chosen, longest)


def main() -> None:
    build_parser("Count new shapes by quarter of an epoch, before and after lengths are padded to a grid.").parse_args()
    table = []
    for rows in ROWS:
        chosen, before, after = measure(rows)
        for what, epoch in (("none", before), (" and ".join(map(str, chosen)), after)):
            quarters = [f"{share:.1%}" for share in epoch.new_shares]
            table.append([rows.name, what, f"{epoch.padding_share:.2%}", *quarters, f"{epoch.num_shapes:,}"])
    about = (
        f".\n\n{NUM_ROWS:,} rows of log-normal lengths, global batches of {GLOBAL_BATCH_SIZE_ROWS} rows, rank 0's "
        "micro-batches. A shape is the rows and the length of each tensor. Padding is what the grid adds. A run takes the "
        "coarsest grid within 3 % in its first 100 steps (`data.pad_lengths`). Goal: at most 5 % new in each quarter after the "
        "first. These are counts, without spread. GPU times: not measured."
    )
    header = ["rows", "multiples of", "padding", *(f"new, quarter {number}" for number in range(1, 5)), "shapes"]
    sections = [format_table(header, table)]
    write_report("new_shapes", "New shapes of micro-batches", about, sections, packages=["torch", "numpy"])


if __name__ == "__main__":
    main()
