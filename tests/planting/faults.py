"""The list of faults. A new one is a patch in a module beside this one and an entry here."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.planting import changed_lines as lines
from tests.planting import state_faults as state
from tests.planting import update_faults as update
from tests.planting.plant import Patch

ABSOLUTE = "tests/distributed/test_absolute.py::test_run_is_that_of_plain_pytorch"
DENSE = "tests/unit/models/test_documents.py::test_loss_and_gradients_are_those_of_a_dense_mask"
ONE_BY_ONE = "tests/unit/models/test_documents.py::test_documents_are_those_of_sdpa_one_after_the_other"
LANGUAGES = "tests/unit/data/tokens/test_languages.py::test_texts_are_marked_as_the_tokenizer_does_and_stay_so_when_it_is_saved"
ORDER = "tests/unit/data/test_batch_plan.py::test_steps_come_neither_in_the_order_of_the_rows_nor_of_their_lengths"
PRECISION = "tests/distributed/test_precision.py::test_in_bf16_what_trains_and_sums_of_gradients_are_fp32"
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
    presets: list[str] | None = None
    """Those of `verify`; None: its own."""
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
        Fault(patch=update.windows_one_too_wide, test=f"{DENSE}[mistral-varlen]", says="Scalars are not close"),
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
        # One changed line each.
        Fault(patch=lines.gradients_reduced_in_bf16, test=f"{PRECISION}[t5-fsdp2_cpu]", says="gradients"),
        Fault(patch=lines.master_weights_in_bf16, test=f"{PRECISION}[t5-fsdp2_cpu]", says="weights"),
        Fault(patch=lines.adapters_master_weights_in_bf16, test=f"{PRECISION}[lora-fsdp2_cpu]", says="weights"),
        Fault(
            patch=lines.recomputation_with_other_masks,
            test="tests/distributed/test_blocks.py::test_checkpointing_keeps_gradients_with_dropout[fsdp2_cpu-overrides0-gpt2]",
            says="transformer.wte.weight",
            verify={"t5": ({"recomputation"}, "largest in ")},
            presets=["fsdp2_activation_checkpointing"],
        ),
        Fault(patch=lines.one_mask_for_all_documents, test=f"{ONE_BY_ONE}[dtype0-dropout]", says="not equal"),
        Fault(patch=lines.dropout_in_the_first_document_only, test=f"{ONE_BY_ONE}[dtype0-dropout]", says="not equal"),
        Fault(patch=lines.default_scale_by_the_number_of_heads, test=f"{ONE_BY_ONE}[dtype1-default scale]", says="not close"),
        Fault(patch=lines.document_of_one_token_seen, test=f"{DENSE}[llama-sdpa a document]", says="not close"),
        Fault(
            patch=lines.bidirectional_windows_ignored,
            test="tests/unit/parallel/test_masks.py::test_a_window_to_both_sides_masks_what_is_beyond_it[8]",
            says="mask is None",
        ),
        Fault(
            patch=lines.alpha_cut_to_a_whole_number,
            test="tests/unit/models/test_lora.py::test_alpha_and_dropout_are_those_of_the_config",
            says="0.625",
        ),
        Fault(
            patch=lines.adapter_dropout_lost,
            test="tests/unit/models/test_lora.py::test_alpha_and_dropout_are_those_of_the_config",
            says="nothing is dropped",
        ),
        Fault(
            patch=lines.merge_in_the_bases_dtype,
            test="tests/unit/export/test_lora.py::test_the_merged_model_has_the_dtype_of_the_base",
            says="dtype",
        ),
        Fault(
            patch=lines.rank_0_random_state_on_all_ranks,
            test="tests/unit/distributed/test_rng.py::test_each_rank_gets_its_own_state_back",
            says="drawn[2:] == drawn[:2]",
        ),
        Fault(patch=lines.target_tokenized_as_a_source, test=f"{LANGUAGES}[m2m_100-source0-target0]", says="__fr__"),
        Fault(
            patch=lines.characters_for_bytes_of_a_target,
            test="tests/unit/data/tokens/test_seq2seq.py::test_a_tokenizer_that_is_trained_on_the_rows_knows_their_prefix",
            says="num_bytes",
        ),
        Fault(
            patch=lines.characters_for_bytes_of_an_answer,
            test="tests/unit/data/tokens/test_causal.py::test_a_prompt_is_followed_by_its_completion_and_the_end_token",
            says="target_bytes",
        ),
        Fault(
            patch=lines.openings_by_their_first_64_characters,
            test="tests/unit/data/rows/test_load.py::test_rows_that_only_start_alike_are_neither_copies_nor_one_group",
            says="data.eval_files",
        ),
        Fault(patch=lines.rows_in_the_order_of_the_file, test=f"{ORDER}[shuffled]", says="corrcoef"),
        Fault(patch=lines.batches_from_short_to_long, test=f"{ORDER}[bucketed]", says="corrcoef"),
        Fault(
            patch=lines.generate_in_fp32,
            test="tests/unit/tools/generate/test_launch.py::test_a_model_computes_as_its_run_did[None-expected0]",
            says="float32",
        ),
    )
    for patch in (fault.patch,)
}
"""By the name of the patch."""
