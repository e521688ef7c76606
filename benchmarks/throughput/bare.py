"""A bare training loop on a recipe's own batches, taking turns: `bare.py CONFIG.json`, with the config of `ours.py`.

Its batches are collated before the clock starts, its forward is the recipe's (attention, chunked loss, autocast), and it does
nothing but forward, backward, clip and update. So what a recipe takes beyond it is the cost of its loop: collating, checks, the
skip guard, logging, memory figures.
"""

import json
import sys
from itertools import count
from pathlib import Path

import torch

from benchmarks.turns import Turns
from toolkit import load_config
from toolkit.data.collate import load_micro_batches
from toolkit.distributed.comm import world_size
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives import objective_of
from toolkit.parallel.wrap import shard_model
from toolkit.training.data import prepare_data
from toolkit.training.model import build_skeleton, load_model
from toolkit.training.optim import build_optimizer
from toolkit.training.setup import setup_run
from toolkit.training.user_functions import UserHooks

NOTHING = torch.empty(0)


def main() -> None:
    side = json.loads(Path(sys.argv[1]).read_text())
    config, num_steps = load_config(side["recipe"], overrides=side["flags"]), side["steps_per_turn"]
    turns = Turns()
    turns.begin()
    run = setup_run(config, objective_of(config), UserHooks())
    build_skeleton(run)
    config, model = run.config, (run.model_config, run.skeleton)
    rows, plan, evaluation = prepare_data(run.objective, config, run.text_metrics, *model, world_size())
    model = shard_model(run.accelerator, *load_model(run)).model
    optimizer = build_optimizer(config.optim, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    for first in count(1, num_steps):
        steps = [plan.step(number) for number in range(first, first + num_steps)]
        micro_batches = plan.iterate(first, first + num_steps - 1, 0)
        batches = list(load_micro_batches(rows.train, micro_batches, evaluation.collator, num_workers=0, pin_memory=False))
        turns.restart_clock()
        losses = []
        for micro_batch, batch in batches:
            loss_sum, _ = summed_loss(model, batch)
            (loss_sum / steps[micro_batch.step - first].num_label_tokens).backward()
            losses.append(loss_sum.detach())
            if micro_batch.is_last:
                torch.nn.utils.clip_grad_norm_(parameters, config.optim.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        tokens = sum(step.num_tokens for step in steps)
        positions = sum(batch["input_ids"].numel() + batch.get("decoder_input_ids", NOTHING).numel() for _, batch in batches)
        turns.end(
            rows=sum(len(step.rows) for step in steps),
            tokens=tokens,
            padding_share=1 - tokens / positions,
            loss=torch.stack(losses).sum().item() / sum(step.num_label_tokens for step in steps),
        )
        turns.begin()


if __name__ == "__main__":
    main()
