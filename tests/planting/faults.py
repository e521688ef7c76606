"""The list of faults. A new one is a patch in `update_faults.py` or `state_faults.py` and an entry here."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.planting import state_faults as state
from tests.planting import update_faults as update
from tests.planting.plant import Patch

ABSOLUTE = "tests/distributed/test_absolute.py::test_run_is_that_of_plain_pytorch"
DOCUMENTS = "tests/unit/models/test_documents.py::test_loss_and_gradients_are_those_of_a_dense_mask[mistral-varlen]"
DROPOUT = "tests/distributed/test_dropout_masks.py::test_masks_differ"
SHARDS = "tests/distributed/test_invariants.py::test_parameters_are_sharded[fsdp2]"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and who says so."""

    patch: Patch
    test: str = ""
    """Id of a test of `make test` that fails of it; empty where only `verify` is asked."""
    says: str = ""
    """Part of what that test then says."""
    verify: dict[str, tuple[set[str], str]] = field(default_factory=dict)
    """Where a user may have it: by recipe, the checks of `verify` that fail of it, and part of what is said."""
    only_in_ranks: bool = False
    """A mistake of the toolkit: what `verify` compares with is whole."""


FAULTS: dict[str, Fault] = {
    patch.__name__: fault
    for fault in (
        Fault(
            patch=update.same_masks_on_all_ranks,
            test=DROPOUT,
            says="masks",
            verify={"t5": ({"dropout"}, "the same elements are dropped")},
        ),
        Fault(
            patch=update.same_masks_in_all_micro_batches,
            test=DROPOUT,
            says="masks",
            verify={"t5": ({"dropout"}, "the same elements are dropped")},
        ),
        Fault(
            patch=update.dropout_ignores_the_seed,
            test=DROPOUT,
            says="masks",
            verify={"t5": ({"dropout"}, "the same elements are dropped")},
        ),
        Fault(patch=update.windows_one_too_wide, test=DOCUMENTS, says="Scalars are not close"),
        Fault(patch=update.smoothed_labels, test=f"{ABSOLUTE}[t5-single]", says="loss of a step"),
        Fault(
            patch=update.lr_in_the_first_group_only,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.lr_one_step_late,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.beta2_fixed,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.eps_fixed,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.no_clipping,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.clipping_by_the_local_norm,
            test=f"{ABSOLUTE}[llama-fsdp2_cpu]",
            says="loss of a step",
            verify={"t5": ({"update"}, "is not what AdamW makes of its gradient")},
        ),
        Fault(
            patch=update.missing_gradient_average,
            test=f"{ABSOLUTE}[llama-fsdp2_cpu]",
            says="grad_norm of a step",
            verify={"t5": ({"gradients"}, "largest in "), "llm": ({"gradients"}, "largest in ")},
        ),
        Fault(
            patch=update.wrong_loss_divisor,
            test=f"{ABSOLUTE}[llama-single]",
            says="loss of a step",
            verify={"t5": ({"gradients", "loss", "evaluation"}, "largest in ")},
        ),
        Fault(
            patch=state.last_evaluation_batch_lost,
            test=f"{ABSOLUTE}[llama-single]",
            says="evaluation loss",
            verify={"t5": ({"evaluation"}, "the evaluation loss differs")},
        ),
        Fault(
            patch=state.one_beam,
            test=f"{ABSOLUTE}[llama-single]",
            says="generated texts",
            only_in_ranks=True,
            verify={"t5": ({"generation"}, "not those of plain transformers")},
        ),
        Fault(
            patch=state.repeated_ngrams,
            test=f"{ABSOLUTE}[llama-single]",
            says="generated texts",
            verify={"t5": ({"generation"}, "texts repeat 2 tokens")},
        ),
        Fault(
            patch=state.doubled_alpha,
            test=f"{ABSOLUTE}[lora-single]",
            says="loss of a step",
            verify={"llm": ({"adapter"}, "is not what alpha and rank say")},
        ),
        Fault(
            patch=state.untied_weight,
            test=f"{ABSOLUTE}[t5-single]",
            says="loss of a step",
            verify={"t5": ({"ties"}, "no longer one weight: shared.weight = ")},
        ),
        Fault(
            patch=state.silent_ddp,
            test=SHARDS,
            says="DTensor",
            verify={"t5": ({"sharding"}, "a rank holds 100% of the parameters")},
        ),
        Fault(patch=state.dropped_slice, verify={"t5": ({"save"}, "could not be written")}),
        Fault(
            patch=state.lost_slice,
            verify={"t5": ({"save", "resume"}, "optimizer.state.shared.weight.exp_avg differs")},
        ),
        Fault(
            patch=state.random_state_not_restored,
            verify={"t5": ({"resume"}, "loss of step 3 differs"), "llm": ({"resume"}, "loss of step 3 differs")},
        ),
        Fault(patch=state.wrong_start, verify={"t5": ({"start"}, "model.shared.weight differs")}),
    )
    for patch in (fault.patch,)
}
"""By the name of the patch."""
