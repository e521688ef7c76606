"""Faults that are one or two changed lines of the toolkit, written as a mistake would leave them."""

import importlib
from operator import attrgetter

from pytest import MonkeyPatch

from tests.planting.plant import Patch, change

# Name: function, then each text that stands there once, and the one in its place.
LINES: dict[str, tuple[str, *tuple[tuple[str, str], ...]]] = {
    # --- Precision.
    # FSDP adds the gradients of its ranks in the dtype that it computes in.
    "gradients_reduced_in_bf16": (
        "toolkit.launch.accelerator:_set_fsdp_precision",
        ("reduce_dtype=torch.float32)", "reduce_dtype=dtype)"),
        ("reduce_dtype=torch.float32, buffer_dtype", "reduce_dtype=dtype, buffer_dtype"),
    ),
    # All weights are stored as bf16 presets compute with them.
    "master_weights_in_bf16": (
        "toolkit.training.model:load_model",
        (
            "cast_frozen(model, run.frozen_dtype)",
            "cast_frozen(model, run.frozen_dtype); model.to(compute_dtype(run.accelerator))",
        ),
    ),
    # An adapter is cast with its base.
    "adapters_master_weights_in_bf16": (
        "toolkit.models.freeze:cast_frozen",
        ("parameter.requires_grad or id(parameter)", "id(parameter)"),
    ),
    # --- Pairs of answers.
    # The rejected answer is made the likelier one.
    "answers_of_a_pair_swapped": (
        "toolkit.objectives.preference_losses:difference",
        ("values_P2[:, 0] - values_P2[:, 1]", "values_P2[:, 1] - values_P2[:, 0]"),
    ),
    # --- Dropout and attention.
    # Activation checkpointing recomputes a block with other dropout masks, as accelerate's does under FSDP2.
    "recomputation_with_other_masks": (
        "toolkit.parallel.blocks:_checkpointed",
        ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"),
    ),
    # Each document of a packed row draws its dropout from the same random state.
    "one_mask_for_all_documents": (
        "toolkit.models.patches.documents:attend_by_document",
        ("outputs = []", "outputs, state = [], torch.get_rng_state()"),
        ("mask = None", "mask = torch.set_rng_state(state)"),
    ),
    # The other documents of a packed row have none.
    "dropout_in_the_first_document_only": (
        "toolkit.models.patches.documents:attend_by_document",
        ("dropout=dropout", "dropout=0.0 if outputs else dropout"),
    ),
    # A document starts where positions fall; after a single token they do not.
    "document_of_one_token_seen": (
        "toolkit.models.patches.masks:known_masks",
        ("prepend=before_B1) != 1)", "prepend=before_B1) < 0)"),
    ),
    # A mask without padding is left out, although it has a window.
    "bidirectional_windows_ignored": (
        "toolkit.models.patches.masks:known_masks",
        ("padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)", "padding_mask is None"),
    ),
    # --- Adapters.
    # LoRA's alpha loses its fraction.
    "alpha_cut_to_a_whole_number": (
        "toolkit.models.lora:_new_lora",
        ("int(config.alpha) if float(config.alpha).is_integer() else config.alpha", "int(config.alpha)"),
    ),
    # An adapter has no dropout, whatever the config says.
    "adapter_dropout_lost": ("toolkit.models.lora:_new_lora", ("lora_dropout=config.dropout", "lora_dropout=0.0")),
    # A merge rounds to the base's dtype before it adds.
    "merge_in_the_bases_dtype": ("toolkit.export.lora:Merge.merged", ("weight.to(torch.float32, copy=True)", "weight.clone()")),
    # --- Random state, rows, generation.
    # A resume restores one rank's random state everywhere.
    "rank_0_random_state_on_all_ranks": ("toolkit.distributed.rng:load_random_state", ("rng-{rank():05d}", "rng-00000")),
    # The tokenizer marks a translation with the language of its source.
    "target_tokenized_as_a_source": (
        "toolkit.objectives.seq2seq:Seq2Seq.tokenize",
        ('config.max_target_length_tokens, "text_target"', 'config.max_target_length_tokens, "text"'),
    ),
    # Bits per byte are bits per character of an encoder-decoder's targets.
    "characters_for_bytes_of_a_target": ("toolkit.objectives.seq2seq:Seq2Seq.tokenize", ("len(text.encode())", "len(text)")),
    # Bits per byte are bits per character of what a causal model answers.
    "characters_for_bytes_of_an_answer": ("toolkit.data.tokens.causal:_mask", ("len(piece.encode())", "len(piece)")),
    # Rows with a long common beginning count as copies, and as one group.
    "openings_by_their_first_64_characters": ("toolkit.data.rows.load:hash64", ("text.encode()", "text[:64].encode()")),
    # Without buckets, nothing shuffles an epoch's rows.
    "rows_in_the_order_of_the_file": ("toolkit.data.batch_plan:BatchPlan._draw_batches", ("random.permutation(rows)", "rows")),
    # With buckets, an epoch goes through its batches by their length.
    "batches_from_short_to_long": (
        "toolkit.data.batch_plan:BatchPlan._draw_batches",
        ("order = random.permutation(num_full) if self.bucket_by_length else", "order ="),
    ),
    # `generate` computes in fp32, whatever the run computed in.
    "generate_in_fp32": ("toolkit.tools.generate.model:load_generator", ("dtype or generator.usage.dtype", 'dtype or "float32"')),
    # --- Mixtures of experts, and ranks.
    # The auxiliary loss is a mean over the tokens of a micro-batch, padding included.
    "auxiliary_loss_of_the_micro_batch": (
        "toolkit.training.router_loss:RouterLoss.share",
        ("self.step.num_tokens", "documents_BT.numel()"),
    ),
    # Each rank takes its own tokens for those of the global batch.
    "routing_counted_on_one_rank": (
        "toolkit.training.router_loss:RouterLoss.reduced_figures",
        ("self.run.guard.reduced(self.figures)", "self.figures"),
    ),
    # Two ranks may have gradients of different parameters.
    "gradients_of_other_parameters_added_up": (
        "toolkit.training.parameter_checks:ReductionWatch.check",
        ("most != least", "most < least"),
    ),
    # --- Bugs that other trainers had; README.md has the table, and `field_faults.py` more of them.
    # The loss is divided by one more token a row, the first, which nothing predicts.
    "divisor_counts_first_labels": (
        "toolkit.data.batch_plan:BatchPlan.step",
        ("int(self.num_label_tokens[rows].sum())", "int(self.num_label_tokens[rows].sum()) + len(rows)"),
    ),
    # Each position predicts the token after the next.
    "labels_shifted_twice": ("toolkit.data.collate:CausalCollator.collate", (".roll(-1, dims=1)", ".roll(-2, dims=1)")),
    # Labels that are the padding token do not count: where that is the end token, no text learns to end.
    "padding_tokens_never_labels": (
        "toolkit.data.tokens.causal:_mask",
        ("labels[:1] = IGNORED_LABEL", "labels[labels == 1] = labels[:1] = IGNORED_LABEL"),
    ),
    # As above, where a batch is made: the batch plan counts them.
    "padding_tokens_masked_in_batches": (
        "toolkit.data.collate:_counted_labels",
        ("(labels_BT.flatten() != IGNORED_LABEL)", "((labels_BT.flatten() != IGNORED_LABEL) & (labels_BT.flatten() != 1))"),
    ),
    # The first token of an answer does not count.
    "mask_off_by_one": (
        "toolkit.data.tokens.causal:_mask",
        ("labels[first:last] = input_ids[first:last]", "labels[first + 1 : last] = input_ids[first + 1 : last]"),
    ),
    # The loss is right, its gradient twice as large.
    "gradient_of_the_head_doubled": (
        "toolkit.loss:chunked_cross_entropy",
        ("logits_nV = head(hidden_nD)", "logits_nV = 2 * (part := head(hidden_nD)) - part.detach()"),
    ),
    # DDP never reduces, so that each rank goes its own way.
    "gradients_not_synchronized": (
        "toolkit.parallel.wrap:accumulating",
        ("isinstance(model, DistributedDataParallel) and not is_last", "isinstance(model, DistributedDataParallel)"),
    ),
    # Under DDP, only the wrapper goes back to training.
    "dropout_off_after_an_evaluation": (
        "toolkit.parallel.gather:evaluation_model",
        (
            "        sharded.model.train()\n",
            "        sharded.model.training = True\n        is_sharded or sharded.unwrapped.eval()\n",
        ),
    ),
    # The model stays in training mode.
    "evaluation_with_dropout": ("toolkit.parallel.gather:evaluation_model", ("    sharded.model.eval()\n    try", "    try")),
    # Once by the tokens, once by the ranks; with one process by two all the same.
    "evaluation_loss_divided_twice": (
        "toolkit.evaluation.loop:figures_of",
        ("loss = total_loss / total_tokens", "loss = total_loss / total_tokens / 2"),
    ),
    # Ranks without a batch evaluate rows that others have.
    "last_rows_counted_twice": ("toolkit.evaluation.rows:plan_evaluation", ("batches += [[]] *", "batches += [batches[0]] *")),
}


def line(name: str) -> Patch:
    """The patch of that name."""
    where, *edits = LINES[name]
    module, _, function = where.partition(":")

    def patch(patch: MonkeyPatch) -> None:
        change(patch, attrgetter(function)(importlib.import_module(module)), *edits)

    patch.__name__ = name
    return patch
