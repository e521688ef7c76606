"""What a cell of the support table must come to: a few steps of plain transformers and peft, a row at a time, in fp64.

The toolkit is imported for two things only: the first values of an adapter, and the values that NF4 codes stand for.
"""

from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.families.families import BETA1, BETA2, EPS, IN_FP32, LR, NUM_STEPS, SETTINGS

Row = dict[str, str]


def load_base(folder: Path, dtype: torch.dtype, **how):
    """The model of `folder`, without dropout."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=dtype, **how).eval()


def train_plain(
    folder: Path,
    kind: str,
    rows: list[Row],
    held_out: list[Row],
    adapter: Path,
    frozen: str | None,
    languages: tuple[str, str] | None,
) -> list[float]:
    """The loss of each step, and then that of the rows that are held out. Each step takes all rows.

    Args:
        kind: of `table.KINDS`.
        adapter: an exported adapter, of which the settings are taken, where the kind has one.
        frozen: part of the names of parameters that do not train in full; None: all train.
        languages: of source and target, where the tokenizer marks them.
    """
    kind_of_model = transformers.AutoConfig.from_pretrained(folder).model_type
    dtype = torch.float32 if kind_of_model in IN_FP32 else torch.float64
    model = load_base(folder, dtype, attn_implementation="eager", experts_implementation="eager")
    # `AutoTokenizer` would take a class of its own for a Qwen 2, and other parts than the file has.
    reader = transformers.AutoTokenizer if languages else transformers.PreTrainedTokenizerFast
    tokenizer = reader.from_pretrained(folder)
    if languages:
        tokenizer.src_lang, tokenizer.tgt_lang = languages
    if kind != "full":
        model = add_lora(model, adapter)
    if kind == "nf4":
        quantize_values(model)
    for name, parameter in model.named_parameters():
        if kind == "full" and frozen and frozen in name:
            parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr = SETTINGS.get(kind_of_model, {}).get("optim.lr", LR)
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.0)
    losses = []
    for of_step in [rows] * NUM_STEPS + [held_out]:
        tokens = [(_seq2seq_tokens if model.config.is_encoder_decoder else _causal_tokens)(tokenizer, row) for row in of_step]
        num_labels, loss = sum(count for _, count in tokens), 0.0
        for inputs, count in tokens:
            if kind_of_model == "fsmt":  # without these its decoder reads the source
                start = torch.tensor([[model.config.decoder_start_token_id]])
                inputs["decoder_input_ids"] = torch.cat([start, inputs["labels"][:, :-1]], dim=1)
            row_loss = model(**inputs, use_cache=False).loss * count / num_labels
            row_loss.backward()
            loss += row_loss.item()
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def add_lora(model, adapter: Path):
    """peft's model with a new adapter of these settings, whose first values are those of a run."""
    import peft

    from toolkit.models.weights import draw_new

    config = peft.LoraConfig.from_pretrained(adapter)
    config.inference_mode = False
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data = draw_new(name.removeprefix("base_model.model."), parameter.shape, 0).to(model.dtype)
    return adapted.eval()


@torch.no_grad()
def quantize_values(adapted) -> None:
    """Give the adapted linear layers, except the head, the values that NF4 codes have."""
    from toolkit.models.quantized import dequantize, find_scales, quantize

    head = adapted.get_base_model().get_output_embeddings()
    for module in adapted.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, torch.nn.Linear) and module is not head and base.in_features % 64 == 0:
            weight = base.weight.float()
            base.weight.copy_(dequantize(quantize(weight, "nf4"), find_scales(weight)))


def _causal_tokens(tokenizer, row: Row) -> tuple[dict[str, torch.Tensor], int]:
    """A forward's inputs, and the number of label tokens: those of the completion, and the end token."""
    prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
    whole = [*tokenizer(row["prompt"] + row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + whole[len(prompt) :]
    return {"input_ids": torch.tensor([whole]), "labels": torch.tensor([labels])}, len(whole) - len(prompt)


def _seq2seq_tokens(tokenizer, row: Row) -> tuple[dict[str, torch.Tensor], int]:
    """As `_causal_tokens`; the labels are the target's tokens."""
    source, target = tokenizer(row["source"]).input_ids, tokenizer(text_target=row["target"]).input_ids
    return {"input_ids": torch.tensor([source]), "labels": torch.tensor([target])}, len(target)
