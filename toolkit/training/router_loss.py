"""The auxiliary loss of a mixture's routers, which evens out the load of its experts: exact for any micro-batch and any ranks.

A layer's is `loss.summed_balance_loss` over the tokens of the global batch, without padding, divided by their number. The mean of
the layers (transformers pools them) times `router_aux_loss_coef` is added to the loss of training.

Shapes: `L` layers with a router, `E` experts, `G` documents, `T` tokens of a micro-batch, `K` experts of a token.
"""

from collections.abc import Iterator

import torch

from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.data.collate import Batch, move_to
from toolkit.distributed.comm import rank, world_size
from toolkit.distributed.rng import seed_all
from toolkit.distributed.watchdog import enter_phase
from toolkit.loss import count_routed, scale_to_global_mean, summed_balance_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel.wrap import forget_forwards
from toolkit.training.setup import Run


class RouterLoss:
    """The auxiliary loss of a step."""

    figures: torch.Tensor
    """fp32 (L, 1 + E): each layer's loss, summed over this rank's tokens so far, and the tokens sent to each expert."""
    shares_LE: torch.Tensor | None = None
    """Shares of the global batch's tokens that are sent to each expert; None: each document has its own."""

    def __init__(self, run: Run, step: Step) -> None:
        self.run, self.step, self.noted = run, step, run.sharded.routes

    @torch.no_grad()
    def count(self, micro_batches: Iterator[tuple[MicroBatch, Batch]]) -> list[tuple[MicroBatch, Batch]]:
        """Count the routing of the global batch, with the dropout of the training pass; returns what it took. Collective."""
        sharded, held = self.run.sharded, []
        for micro_batch, batch in micro_batches:
            enter_phase("counting the routing", self.step.step)
            held.append((micro_batch, move_to(sharded.accelerator.device, batch)))
            seed_all("step", self.run.config.train.seed, self.step.step, rank(), micro_batch.index)
            inputs = {name: value[:1] if "label" in name else value for name, value in held[-1][1].items()}
            documents_BT = inputs.pop("documents")
            summed_loss(sharded.model, inputs)  # of one label
            self.share(micro_batch, documents_BT)
            if micro_batch.is_last:
                break
        self.shares_LE = self.reduced_figures()[:, 1:] / self.step.num_tokens
        del self.figures
        forget_forwards(sharded.model)
        return held

    def share(self, micro_batch: MicroBatch, documents_BT: torch.Tensor) -> torch.Tensor:
        """What the micro-batch of the last forward adds to the loss that its rank backpropagates."""
        documents_T, num_documents = documents_BT.flatten(), sum(map(len, micro_batch.packs))
        routes = [route for of_block in self.noted.values() for route in of_block]
        scale = self.run.sharded.unwrapped.config.get_text_config().router_aux_loss_coef / len(routes)
        figures = []
        for layer, (scores_TE, experts_TK) in enumerate(routes):
            counts_GE = count_routed(experts_TK, documents_T, num_documents, scores_TE.shape[1])
            shares_GE = counts_GE * experts_TK.shape[1] / counts_GE.sum(dim=1, keepdim=True).clamp(min=1)
            if self.shares_LE is not None:
                shares_GE = self.shares_LE[layer].expand_as(counts_GE)
            loss = summed_balance_loss(scores_TE, shares_GE, documents_T) * scale
            figures.append(torch.cat([loss[None], counts_GE.sum(dim=0)]))
        self.noted.clear()
        figures_LX = torch.stack(figures)
        self.figures = figures_LX.detach() + getattr(self, "figures", 0)
        return scale_to_global_mean(figures_LX[:, 0].sum(), self.step.num_tokens, world_size())

    def reduced_figures(self) -> torch.Tensor:
        """`figures` of all ranks. Collective."""
        return self.run.guard.reduced(self.figures)
