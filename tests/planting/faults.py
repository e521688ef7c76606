"""The list of faults. A new one is a patch in a module beside this one and an entry here."""

from dataclasses import dataclass, field

from tests.planting import field_faults as bugs
from tests.planting import state_faults as state
from tests.planting import update_faults as update
from tests.planting.changed_lines import line
from tests.planting.plant import Patch

ABSOLUTE = "tests/distributed/test_absolute.py::test_run_is_that_of_plain_pytorch"
DENSE = "tests/unit/models/patches/test_documents.py::test_loss_and_gradients_are_those_of_a_dense_mask"
ONE_BY_ONE = "tests/unit/models/patches/test_documents.py::test_documents_are_those_of_sdpa_one_after_the_other"
LANGUAGES = "tests/unit/data/tokens/test_languages.py::test_texts_are_marked_as_the_tokenizer_does_and_stay_so_when_it_is_saved"
ORDER = "tests/unit/data/test_batch_plan.py::test_steps_come_neither_in_the_order_of_the_rows_nor_of_their_lengths"
PRECISION = "tests/distributed/test_precision.py::test_in_bf16_what_trains_and_sums_of_gradients_are_fp32"
DROPOUT = "tests/distributed/test_dropout_masks.py::test_masks_differ"
SHARDS = "tests/distributed/test_invariants.py::test_parameters_are_sharded[fsdp2]"
LLAMA, LLAMA_ON_2, T5 = f"{ABSOLUTE}[llama-single]", f"{ABSOLUTE}[llama-fsdp2_cpu]", f"{ABSOLUTE}[t5-single]"
LOSS = "loss of a step"
PAIRS = "tests/unit/objectives/test_preference.py::test_a_loss_is_its_formula"
LORA = "tests/unit/models/test_lora.py::test_alpha_and_dropout_are_those_of_the_config"
ROUTERS = "tests/unit/training/test_user_functions.py::test_"
SAME_MASKS = {"t5": ({"dropout"}, "the same elements are dropped")}
NOT_ADAMW = {"t5": ({"update"}, "is not what AdamW makes of its gradient")}


@dataclass(frozen=True)
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
    flags: tuple[str, ...] = ()
    """Those that `verify` needs to see it."""
    only_in_ranks: bool = False
    """A mistake of the toolkit: what `verify` compares with is whole."""


FAULTS: dict[str, Fault] = {
    fault.patch.__name__: fault
    for fault in (
        Fault(update.same_masks_on_all_ranks, DROPOUT, "masks", SAME_MASKS),
        Fault(update.same_masks_in_all_micro_batches, DROPOUT, "masks", SAME_MASKS),
        Fault(update.dropout_ignores_the_seed, DROPOUT, "masks", SAME_MASKS),
        Fault(update.windows_one_too_wide, f"{DENSE}[mistral-varlen]", "Scalars are not close"),
        Fault(update.smoothed_labels, T5, LOSS),
        Fault(update.lr_in_the_first_group_only, LLAMA, LOSS, NOT_ADAMW),
        Fault(update.lr_one_step_late, LLAMA, LOSS, NOT_ADAMW),
        Fault(update.beta2_fixed, LLAMA, LOSS, NOT_ADAMW),
        Fault(update.eps_fixed, LLAMA, LOSS, NOT_ADAMW),
        Fault(update.no_clipping, LLAMA, LOSS, NOT_ADAMW),
        Fault(update.clipping_by_the_local_norm, LLAMA_ON_2, LOSS, NOT_ADAMW),
        Fault(
            update.missing_gradient_average,
            LLAMA_ON_2,
            "grad_norm of a step",
            {"t5": ({"gradients"}, "largest in "), "llm": ({"gradients"}, "largest in ")},
        ),
        Fault(update.wrong_loss_divisor, LLAMA, LOSS, {"t5": ({"gradients", "loss", "evaluation", "text"}, "largest in ")}),
        Fault(
            state.last_evaluation_batch_lost,
            LLAMA,
            "evaluation loss",
            {"t5": ({"evaluation", "text"}, "differs")},
        ),
        Fault(
            state.one_beam,
            LLAMA,
            "generated texts",
            {"t5": ({"generation"}, "not those of plain transformers")},
            only_in_ranks=True,
        ),
        Fault(state.repeated_ngrams, LLAMA, "generated texts", {"t5": ({"generation"}, "texts repeat 2 tokens")}),
        Fault(
            state.doubled_alpha,
            f"{ABSOLUTE}[lora-single]",
            LOSS,
            {"llm": ({"text"}, "largest in ")},
        ),
        Fault(state.untied_weight, T5, LOSS, {"t5": ({"text"}, "largest in ")}),
        Fault(state.silent_ddp, SHARDS, "DTensor", {"t5": ({"sharding"}, "a rank holds 100% of the parameters")}),
        Fault(state.dropped_slice, verify={"t5": ({"run"}, "could not be written")}),
        Fault(state.lost_slice, verify={"t5": ({"save", "resume"}, "optimizer.state.shared.weight.exp_avg differs")}),
        Fault(
            state.moments_requantized,
            verify={"t5": ({"save", "resume"}, ".exp_avg")},
            flags=("--optim.name=adamw_8bit",),
        ),
        Fault(
            state.random_state_not_restored,
            verify={name: ({"save", "resume"}, "loss of step 3 differs") for name in ("t5", "llm")},
        ),
        Fault(state.wrong_start, verify={"t5": ({"start"}, "model.shared.weight differs")}),
        Fault(
            state.scales_shifted_by_a_block,
            verify={
                "nf4": (
                    {"start", "loss", "gradients", "evaluation", "positions", "export"},
                    ".scales is not what one process loads",
                )
            },
        ),
        Fault(state.codes_cast, verify={"nf4": ({"export"}, ".codes is not what was trained")}),
        # One changed line each.
        Fault(line("answers_of_a_pair_swapped"), f"{PAIRS}[0.0-sigmoid]", "approx"),
        Fault(line("gradients_reduced_in_bf16"), f"{PRECISION}[t5-fsdp2_cpu]", "gradients"),
        Fault(line("master_weights_in_bf16"), f"{PRECISION}[t5-fsdp2_cpu]", "weights"),
        Fault(line("adapters_master_weights_in_bf16"), f"{PRECISION}[lora-fsdp2_cpu]", "weights"),
        Fault(
            line("recomputation_with_other_masks"),
            "tests/distributed/test_blocks.py::test_checkpointing_keeps_gradients_with_dropout[fsdp2_cpu-overrides0-families0]",
            "transformer.wte.weight",
            {"t5": ({"recomputation"}, "largest in ")},
            presets=["fsdp2_activation_checkpointing"],
        ),
        Fault(line("one_mask_for_all_documents"), f"{ONE_BY_ONE}[dtype0-dropout]", "not equal"),
        Fault(line("dropout_in_the_first_document_only"), f"{ONE_BY_ONE}[dtype0-dropout]", "not equal"),
        Fault(line("document_of_one_token_seen"), f"{DENSE}[llama-sdpa a document]", "not close"),
        Fault(
            line("bidirectional_windows_ignored"),
            "tests/unit/models/patches/test_masks.py::test_a_window_to_both_sides_masks_what_is_beyond_it[8]",
            "mask is None",
        ),
        Fault(line("alpha_cut_to_a_whole_number"), LORA, "0.625"),
        Fault(line("adapter_dropout_lost"), LORA, "nothing is dropped"),
        Fault(
            line("merge_in_the_bases_dtype"),
            "tests/unit/export/test_lora.py::test_the_merged_model_has_the_dtype_of_the_base",
            "dtype",
        ),
        Fault(
            line("rank_0_random_state_on_all_ranks"),
            "tests/unit/distributed/test_rng.py::test_each_rank_gets_its_own_state_back",
            "drawn[2:] == drawn[:2]",
        ),
        Fault(
            line("gradients_of_other_parameters_added_up"),
            "tests/distributed/test_reduced_gradients.py::test_the_run_ends_and_names_the_parameters[first]",
            "[0, 0]",
        ),
        Fault(line("target_tokenized_as_a_source"), f"{LANGUAGES}[m2m_100-source0-target0]", "__fr__"),
        Fault(
            line("characters_for_bytes_of_a_target"),
            "tests/unit/data/tokens/test_seq2seq.py::test_a_tokenizer_that_is_trained_on_the_rows_knows_their_prefix",
            "num_bytes",
        ),
        Fault(
            line("characters_for_bytes_of_an_answer"),
            "tests/unit/data/tokens/test_causal.py::test_a_prompt_is_followed_by_its_completion_and_the_end_token",
            "target_bytes",
        ),
        Fault(
            line("openings_by_their_first_64_characters"),
            "tests/unit/data/rows/test_load.py::test_rows_that_only_start_alike_are_neither_copies_nor_one_group",
            "data.eval_files",
        ),
        Fault(line("rows_in_the_order_of_the_file"), f"{ORDER}[shuffled]", "corrcoef"),
        Fault(line("batches_from_short_to_long"), f"{ORDER}[bucketed]", "corrcoef"),
        Fault(
            line("generate_in_fp32"),
            "tests/unit/tools/generate/test_generate.py::test_a_model_computes_as_its_run_did[None-expected0]",
            "float32",
        ),
        Fault(
            line("auxiliary_loss_of_the_micro_batch"),
            f"{ROUTERS}parts_and_figures_add_up_to_those_of_one_micro_batch[global]",
            "close",
        ),
        Fault(line("routing_counted_on_one_rank"), f"{ROUTERS}figures_are_reduced_over_every_group", "6.0"),
        # Bugs of other trainers; `verify` alone is asked, except where the run itself ends.
        Fault(line("divisor_counts_first_labels"), verify={"llm": ({"text"}, "the run counts")}),
        Fault(line("labels_shifted_twice"), LLAMA, "cannot be trained: its loss by hidden states is"),
        Fault(line("padding_tokens_never_labels"), verify={"llm": ({"text"}, "has other tokens or labels")}),
        Fault(line("padding_tokens_masked_in_batches"), verify={"llm": ({"run"}, "tokens would not be trained")}),
        Fault(line("mask_off_by_one"), verify={"llm": ({"text"}, "has other tokens or labels")}),
        Fault(bugs.two_starts, verify={"llm": ({"text"}, "has other tokens or labels")}),
        Fault(line("gradient_of_the_head_doubled"), verify={"t5": ({"text"}, "largest in ")}),
        Fault(bugs.autocast_whatever_the_config, verify={"t5": ({"text"}, "the loss differs")}),
        Fault(
            line("gradients_not_synchronized"),
            verify={"t5": ({"gradients", "loss", "evaluation", "generation"}, "largest in ")},
            presets=["ddp"],
        ),
        Fault(bugs.gradients_of_the_first_layer_only, verify={"llm": ({"run"}, "have not moved")}),
        Fault(bugs.later_epochs_in_another_order_after_a_resume, verify={"t5": ({"resume"}, "of step 3 differs")}),
        Fault(bugs.second_resume_starts_the_data_again, verify={"t5": ({"resume"}, "of step 4 differs")}),
        Fault(bugs.resume_at_an_epochs_end_repeats_it, verify={"t5": ({"resume"}, "of step 3 differs")}),
        Fault(bugs.resume_never_read, verify={"t5": ({"save", "resume"}, "were logged")}),
        Fault(
            bugs.evaluations_without_gain_forgotten,
            "tests/unit/checkpoint/test_load.py::test_all_of_the_state_between_steps_comes_back",
            "num_evaluations_without_gain",
        ),
        Fault(bugs.moments_not_loaded, verify={"t5": ({"save", "resume"}, "")}),
        Fault(line("dropout_off_after_an_evaluation"), verify={"t5": ({"modes"}, "was in the other mode")}),
        Fault(bugs.dropout_zero_after_an_evaluation, verify={"t5": ({"resume"}, "largest in loss of step 4")}),
        Fault(line("evaluation_with_dropout"), verify={"t5": ({"modes"}, "was in the other mode")}),
        Fault(bugs.accuracy_of_the_ranks_averaged, LLAMA_ON_2, "token accuracy"),
        Fault(line("evaluation_loss_divided_twice"), verify={"t5": ({"text"}, "loss differs")}),
        Fault(line("last_rows_counted_twice"), verify={"t5": ({"run"}, "a row is missing or doubled")}),
        Fault(
            bugs.state_matched_by_position,
            verify={"t5": ({"start", "loss", "gradients", "evaluation", "positions"}, "weight differs")},
        ),
        Fault(bugs.weights_drawn_again, verify={"t5": ({"text", "positions"}, "differ")}, only_in_ranks=True),
        Fault(bugs.buffers_in_bf16, verify={"llm": ({"buffers", "text"}, "is another")}, only_in_ranks=True),
        Fault(bugs.frozen_trains, verify={"llm": ({"run", "frozen", "sharding", "update", "export", "text"}, "has changed")}),
        Fault(bugs.adapter_lost_in_a_merge, verify={"llm": ({"run", "export"}, "")}),
    )
}
"""By the name of the patch."""
