"""Every rank, micro-batch and step drops other elements."""

from itertools import combinations
from unittest.mock import patch

import numpy as np

from tests.support.small_run import run_in_this_process, run_recipes, without_export, write_inputs

NUM_STEPS = 2


def test_masks_differ(tmp_path):
    write_inputs(tmp_path)
    flags = [f"--model.name_or_path={tmp_path / 'model'}", "--model.from_scratch=true", f"--train.max_steps={NUM_STEPS}"]
    flags += ["--train.micro_batch_size_rows=2", "--eval.at_start=false", "--eval.generate=false"]
    how = {"preset": "fsdp2_cpu", "overrides": {}, "flags": flags, "function": train_and_record_masks}
    _, ranks = run_recipes(tmp_path, {"run": how})["run"]
    masks = {(rank, *place): mask for rank, of_rank in enumerate(ranks) for place, mask in of_rank.items()}
    assert len(masks) == 2 * NUM_STEPS * 4, "ranks x steps x micro-batches"
    equal = [(one, two) for one, two in combinations(sorted(masks), 2) if np.array_equal(masks[one], masks[two])]
    assert equal == [], "masks of (rank, step, micro-batch)"


def train_and_record_masks(recipe: str, argv: list[str], max_logits: int) -> dict:
    """On every rank: what dropout would leave of 256 ones, right before each forward."""
    import torch
    import torch.nn.functional as F

    from toolkit.objectives.objective import Objective
    from toolkit.training import loop

    place: list[tuple[int, int]] = []
    masks = {}
    seed_all, compute = loop.seed_all, Objective.loss

    def note_and_seed(what: str, seed: int, step: int, rank: int, micro_batch: int) -> None:
        place.append((step, micro_batch))
        seed_all(what, seed, step, rank, micro_batch)

    def record_and_compute(*args):
        if torch.is_grad_enabled():
            with torch.random.fork_rng(devices=[]):
                masks[place[-1]] = F.dropout(torch.ones(256), 0.5).numpy()
        return compute(*args)

    with without_export(), patch.object(loop, "seed_all", note_and_seed), patch.object(Objective, "loss", record_and_compute):
        run_in_this_process(recipe, argv)
    return masks
