"""What a rank of `verify` records besides the steps: texts, modes of forwards, what dropout drops, logits of long rows."""

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from toolkit.data.collate import move_to
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.distributed.comm import rank
from toolkit.distributed.rng import random_state_kept
from toolkit.evaluation.rows import even_places
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference import Pairs
from toolkit.parallel.gather import evaluation_model
from toolkit.parallel.wrap import ShardedModel
from toolkit.tools.verify import PROBED_STEPS
from toolkit.tools.verify.plain import NUM_LOGITS, long_rows
from toolkit.tools.verify.proofs import named
from toolkit.training import loop
from toolkit.training.setup import Run


@dataclass
class Probes:
    """What this rank has seen."""

    run: Run | None = None
    """None before its first step."""
    dropout: list[dict[str, Any]] = field(default_factory=list)
    """Losses of one row, each with the dropout of one micro-batch: `rank`, `step`, `micro_batch`, `loss`, `plain_loss` without
    dropout, and `mask`, torch's dropout applied to ones. Step 0 is before the first evaluation."""
    num_forwards: dict[str, int] = field(default_factory=lambda: {"training": 0, "evaluation": 0})
    wrong_modes: list[str] = field(default_factory=list)
    """Of forwards in which a module was in the other mode."""


def watch_modes(probes: Probes, owner: type[Objective]) -> None:
    """Wrap the call that computes a loss, for the rest of this process, and note in which mode the modules are."""
    compute = owner.loss

    @functools.wraps(compute)
    def note_and_compute(objective: Objective, model: Any, batch: Any, *rest: Any) -> Any:
        if batch["input_ids"].is_meta:  # its FLOPs are counted
            return compute(objective, model, batch, *rest)
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        probes.num_forwards[kind] += 1
        wrong = [part or "the model" for part, module in model.named_modules() if module.training != (kind == "training")]
        what = f"was in the other mode in forward {probes.num_forwards[kind]} of {kind} on rank {rank()}"
        probes.wrong_modes += [named(wrong, what)] if wrong else []
        return compute(objective, model, batch, *rest)

    owner.loss = note_and_compute  # type: ignore[method-assign,assignment]


def watch_dropout(probes: Probes) -> None:
    """Wrap the call that seeds a micro-batch, for the rest of this process.

    After that call, in `PROBED_STEPS` of a run with dropout, the loss of the first training row is computed. Row and weights are
    the same on all ranks, so two losses are equal only if all masks are. LoRA's dropout has an effect from the second step on.
    Attention draws its masks in its own kernel, which would hide that other masks are equal, so torch's dropout is also
    applied alone.
    """
    seed_all = loop.seed_all

    def seed_and_look(*parts: Any) -> None:
        seed_all(*parts)
        _, _, step, rank, micro_batch = parts
        if (run := probes.run) is not None and run.config.model.dropout and step in PROBED_STEPS:
            probes.dropout.append(look_at_dropout(run, rank, step, micro_batch))

    loop.seed_all = seed_and_look


def look_at_dropout(run: Run, rank: int, step: int, micro_batch: int) -> dict[str, Any]:
    """What the current random state drops, in the mode that the model is in; both are kept. Collective under FSDP."""
    model, device = run.sharded.model, run.sharded.accelerator.device
    seen: dict[str, Any] = {"rank": rank, "step": step, "micro_batch": micro_batch}
    batch = move_to(device, run.evaluation.collator.collate([[run.rows.train[0]]]))
    modes = [(module, module.training) for module in model.modules()]
    of_pairs: Any = getattr(Pairs.loss, "__wrapped__", Pairs.loss)  # which notes no mode
    for name in ("loss", "plain_loss"):
        if name == "plain_loss":
            model.eval()
        with random_state_kept(), torch.no_grad():
            loss_sum, _ = of_pairs(run.objective, model, batch) if "answer_tokens" in batch else summed_loss(model, batch)
            seen[name] = loss_sum.item()
    for module, mode in modes:
        module.training = mode
    with random_state_kept():
        mask = torch.nn.functional.dropout(torch.ones(64, device=device), 0.5).bool().tolist()
    return seen | {"mask": mask}


def prepare_few(prepare_rows: Callable[..., TokenizedRows], num_rows: int, *args: Any) -> TokenizedRows:
    """So few training rows, from everywhere and of each source, that an epoch is a step of `num_rows` and one of fewer."""
    rows = prepare_rows(*args)
    few = set(even_places(len(rows.train), 2 * num_rows - 1 - num_rows // 4))
    if "source_index" in rows.train.column_names:
        few |= set(np.unique(rows.train.with_format("numpy")["source_index"][:], return_index=True)[1].tolist())
    return dataclasses.replace(rows, train=rows.train.select(sorted(few)))


def save_texts(folder: Path, rows: TokenizedRows, *tokenized: Any) -> None:
    """Write tokenized rows, the texts that they were made of, and the tokenizer. For rank 0."""
    assert rows.texts is not None
    texts = datasets.concatenate_datasets([rows.texts.train, rows.texts.evaluation])
    wanted = [row_id % ROW_IDS_OF_A_PIECE for part in tokenized for row_id in part["row_id"]]
    found = texts.select(np.flatnonzero(np.isin(texts.with_format("numpy")["row_id"][:], wanted)))
    names = {"row_id", "input_ids", "labels", "target_bytes", "prompt_length", "num_chosen_tokens"}
    columns = [part.select_columns(sorted(names & set(part.column_names))).to_list() for part in tokenized]
    rows.tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "texts.json").write_text(json.dumps({"rows": columns, "texts": found[:]}), encoding="utf-8")


@torch.no_grad()
def look_at_positions(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The last logits of long rows, computed as the run computes, and the rows. Collective."""
    device, looked = sharded.accelerator.device, dict[str, torch.Tensor]()
    with evaluation_model(sharded, unshard="never") as (model, _):
        for kind, inputs in long_rows(sharded.skeleton, device.type).items():
            logits_BTV = model(**move_to(device, inputs), use_cache=False).logits[:, -NUM_LOGITS:]
            looked |= {f"{kind}.{name}": t for name, t in inputs.items()} | {
                f"{kind}.logits": logits_BTV.float().cpu().contiguous()
            }
    return looked
