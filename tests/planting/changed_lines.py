"""Faults that are one line of the toolkit, written as a mistake would leave it."""

from __future__ import annotations

from pytest import MonkeyPatch

from tests.planting.plant import change

# --- Precision.


def gradients_reduced_in_bf16(patch: MonkeyPatch) -> None:
    """FSDP adds the gradients of its ranks in the dtype that it computes in."""
    from toolkit.launch import accelerator

    edits = ((f"reduce_dtype=torch.float32{end}", f"reduce_dtype=dtype{end}") for end in (")", ", buffer_dtype"))
    change(patch, accelerator._set_fsdp_precision, *edits)


def master_weights_in_bf16(patch: MonkeyPatch) -> None:
    """All weights are stored as bf16 presets compute with them."""
    from toolkit.training import model

    cast = "cast_frozen(model, context.frozen_dtype)"
    change(patch, model.load_model, (cast, f"{cast}; model.to(compute_dtype(context.accelerator))"))


def adapters_master_weights_in_bf16(patch: MonkeyPatch) -> None:
    """An adapter is cast with its base."""
    from toolkit.models import freeze

    change(patch, freeze.cast_frozen, ("parameter.requires_grad or id(parameter)", "id(parameter)"))


# --- Dropout and attention.


def recomputation_with_other_masks(patch: MonkeyPatch) -> None:
    """Activation checkpointing recomputes a block with other dropout masks, as accelerate's does under FSDP2."""
    from toolkit.parallel import blocks

    change(patch, blocks._checkpointed, ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"))


def one_mask_for_all_documents(patch: MonkeyPatch) -> None:
    """Each document of a packed row draws its dropout from the same random state."""
    from toolkit.models.patches import documents

    keep = ("outputs = []", "outputs, state = [], torch.get_rng_state()")
    change(patch, documents.attend_by_document, keep, ("mask = None", "mask = torch.set_rng_state(state)"))


def dropout_in_the_first_document_only(patch: MonkeyPatch) -> None:
    """The other documents of a packed row have none."""
    from toolkit.models.patches import documents

    change(patch, documents.attend_by_document, ("dropout=dropout", "dropout=0.0 if outputs else dropout"))


def document_of_one_token_seen(patch: MonkeyPatch) -> None:
    """A document starts where positions fall; after a single token they do not."""
    from toolkit.models.patches import masks

    change(patch, masks.known_masks, ("prepend=before_B1) != 1)", "prepend=before_B1) < 0)"))


def bidirectional_windows_ignored(patch: MonkeyPatch) -> None:
    """A mask without padding is left out, although it has a window."""
    from toolkit.models.patches import masks

    right = "padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)"
    change(patch, masks.known_masks, (right, "padding_mask is None"))


# --- Adapters.


def alpha_cut_to_a_whole_number(patch: MonkeyPatch) -> None:
    """LoRA's alpha loses its fraction."""
    from toolkit.models import lora

    right = "int(config.alpha) if float(config.alpha).is_integer() else config.alpha"
    change(patch, lora._new_lora, (right, "int(config.alpha)"))


def adapter_dropout_lost(patch: MonkeyPatch) -> None:
    """An adapter has no dropout, whatever the config says."""
    from toolkit.models import lora

    change(patch, lora._new_lora, ("lora_dropout=config.dropout", "lora_dropout=0.0"))


def merge_in_the_bases_dtype(patch: MonkeyPatch) -> None:
    """A merge rounds to the base's dtype before it adds."""
    from toolkit.export.lora import Merge

    change(patch, Merge.merged, ("weight.to(torch.float32, copy=True)", "weight.clone()"))


# --- Random state, rows, generation.


def rank_0_random_state_on_all_ranks(patch: MonkeyPatch) -> None:
    """A resume restores one rank's random state everywhere."""
    from toolkit.distributed import rng

    change(patch, rng.load_random_state, ("rng-{rank():05d}", "rng-00000"))


def target_tokenized_as_a_source(patch: MonkeyPatch) -> None:
    """The tokenizer marks a translation with the language of its source."""
    from toolkit.data.tokens import seq2seq

    limit = "config.max_target_length_tokens"
    change(patch, seq2seq.tokenize, (f'{limit}, "text_target"', f'{limit}, "text"'))


def characters_for_bytes_of_a_target(patch: MonkeyPatch) -> None:
    """Bits per byte are bits per character of an encoder-decoder's targets."""
    from toolkit.data.tokens import seq2seq

    change(patch, seq2seq.tokenize, ("len(text.encode())", "len(text)"))


def characters_for_bytes_of_an_answer(patch: MonkeyPatch) -> None:
    """Bits per byte are bits per character of what a causal model answers."""
    from toolkit.data.tokens import causal

    change(patch, causal._mask, ("len(piece.encode())", "len(piece)"))


def openings_by_their_first_64_characters(patch: MonkeyPatch) -> None:
    """Rows with a long common beginning count as copies, and as one group."""
    from toolkit.data.rows import load

    change(patch, load.hash64, ("text.encode()", "text[:64].encode()"))


def rows_in_the_order_of_the_file(patch: MonkeyPatch) -> None:
    """Without buckets, nothing shuffles an epoch's rows."""
    from toolkit.data.batch_plan import BatchPlan

    change(patch, BatchPlan._draw_batches, ("random.permutation(rows)", "rows"))


def batches_from_short_to_long(patch: MonkeyPatch) -> None:
    """With buckets, an epoch goes through its batches by their length."""
    from toolkit.data.batch_plan import BatchPlan

    change(patch, BatchPlan._draw_batches, ("order = random.permutation(num_full) if self.bucket_by_length else", "order ="))


def generate_in_fp32(patch: MonkeyPatch) -> None:
    """`generate` computes in fp32, whatever the run computed in."""
    from toolkit.tools.generate import model

    change(patch, model.load_generator, ("dtype or generator.usage.dtype", 'dtype or "float32"'))


# --- Mixtures of experts.


def auxiliary_loss_of_the_micro_batch(patch: MonkeyPatch) -> None:
    """The auxiliary loss is a mean over the tokens of a micro-batch, padding included."""
    from toolkit.training.router_loss import RouterLoss

    change(patch, RouterLoss.share, ("self.step.num_tokens", "documents_BT.numel()"))


def routing_counted_on_one_rank(patch: MonkeyPatch) -> None:
    """Each rank takes its own tokens for those of the global batch."""
    from toolkit.training.router_loss import RouterLoss

    change(patch, RouterLoss.reduced_figures, ("dist.all_reduce(self.figures, group=group)", "pass"))


# --- Ranks.


def gradients_of_other_parameters_added_up(patch: MonkeyPatch) -> None:
    """Two ranks may have gradients of different parameters."""
    from toolkit.training.parameter_checks import ReductionWatch

    change(patch, ReductionWatch.check, ("most != least", "most < least"))
