"""Adds LoRA, rsLoRA and DoRA adapters (peft) to a frozen model, in place: it remains the same transformers model."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.config.schema import AdapterConfig, ModelConfig
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.errors import UserError
from toolkit.models.config import hub_commit
from toolkit.models.freeze import aliases, find_frozen, match_names
from toolkit.models.lora_files import base_name, check_fits, file_names, find_adapter, read_lora_config
from toolkit.models.patches.chunked_loss import text_part
from toolkit.models.quantized import quantize_layers
from toolkit.private import private

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
TIED_NAMES = ("embed_tokens", "lm_head")
"""peft keeps tied modules tied only if one of them has one of these names."""


def check_adapter_config(config: Any) -> None:
    """Refuse settings that exclude each other, and an adapter that could not train, by a `UserError` that names them."""
    adapter, model = config.adapter, config.model
    if not is_enabled(adapter):
        settings = {"adapter.name_or_path": adapter.name_or_path, "adapter.base_dtype": adapter.base_dtype}
        settings["export.merge"] = "true" if config.export.merge else None
        for key, value in settings.items():
            if value is not None:
                raise UserError(f"{key} is {value}, but adapter.method is none: set adapter.method, or leave {key} out")
        return
    if adapter.experts and (adapter.method == "dora" or adapter.dropout):
        given = f"adapter.dropout {adapter.dropout}" if adapter.dropout else "adapter.method dora"
        raise UserError(f"adapter.experts is true, and peft has no {given} for experts: set dropout 0, lora or rslora")
    if model.from_scratch or model.init_from is not None:
        what = "model.from_scratch true" if model.from_scratch else f"model.init_from {model.init_from}"
        trouble = f"adapter.method is {adapter.method} and {what}, but an adapter belongs to the weights of model.name_or_path"
        raise UserError(f"{trouble}: give an exported model there")
    if model.freeze and adapter.modules_to_save:
        raise UserError(f"model.freeze is {model.freeze} and adapter.modules_to_save {adapter.modules_to_save}: give one of them")


def is_enabled(config: AdapterConfig) -> bool:
    """Whether an adapter is trained."""
    return config.method != "none"


def add_adapter(model: PreTrainedModel, config: AdapterConfig, base: ModelConfig) -> None:
    """Freeze a model on the meta device and add an adapter in place: a new one, or that of `adapter.name_or_path`.

    Call it on the skeleton, to find mistakes early, then on the model, whose parameters get their values by
    `weights.complete_readers`. Trainable ones are fp32, whatever the base's dtype. Names that match nothing, ties that would
    break, and an adapter that does not fit are a `UserError`.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    from toolkit.models.expert_adapters import compute_beside  # imports peft

    if not model.can_generate():  # peft has other names for these, and their heads and labels are not the base's
        what = f"adapter.method is {config.method}, and a {type(model).__name__} generates no text"
        raise UserError(f"{what}, so that its adapter could not be read with its base: set adapter.method none")
    # peft's config: the existing adapter's, or a new one.
    folder = find_adapter(config.name_or_path) if config.name_or_path else None
    what = f"adapter.name_or_path {config.name_or_path}" if folder else "the adapter"
    lora = read_lora_config(folder, config) if folder else _new_lora(model, config, base.freeze)
    tokens: Any = load_tokenizer(base).convert_tokens_to_ids(base.add_tokens) if base.add_tokens else []
    saved = lora.modules_to_save or ()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = {name: tokens for name, module in model.named_modules() if tokens and module in ends and name not in saved} or None
    if folder and lora.trainable_token_indices != rows:
        theirs = lora.trainable_token_indices
        raise UserError(f"{what} trains the rows {theirs}, and those of model.add_tokens are {rows}: name the tokens that it has")
    lora.trainable_token_indices = rows
    lora.task_type = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"  # peft's names for the classes of models
    lora.base_model_name_or_path = base.name_or_path
    lora.revision = base.revision or hub_commit(base)
    # Inject.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPT-2's Conv1D, ties that `_check_ties` reports better, …
        try:
            inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            if isinstance(lora.target_modules, set):  # a set prints in another order in every process
                reason = reason.replace(str(lora.target_modules), ", ".join(sorted(lora.target_modules)))
            raise UserError(f"{what} does not fit {base.name_or_path}: {reason}") from None
    _check_ties(model, what)
    _check_names(model, what)
    compute_beside(model, what)
    if config.base_dtype is not None:
        quantize_layers(model, config.base_dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            module.trainable_tokens_original.clear()  # buffers that only `unmerge` reads
    if folder:
        check_fits(model, folder, base.name_or_path, what)


def _new_lora(model: PreTrainedModel, config: AdapterConfig, frozen: list[str]) -> LoraConfig:
    """peft's config of a new adapter, which leaves out layers with parameters that match `frozen`."""
    from peft import LoraConfig

    from toolkit.models.expert_adapters import choose_linears, taken_for_experts, weights_of

    modules_to_save, is_tied = _modules_to_save(model, config.modules_to_save)
    targets: list[str] | str = config.target_modules
    excluded = _exclude(model, config.exclude_modules, frozen)
    if targets == ALL_LINEAR:
        targets = choose_linears(model, excluded) or targets
    else:
        if isinstance(targets, str) and any(f".{name}".endswith(f".{targets}") for name, _ in model.named_modules()):
            targets = [targets]
        _check_targets(model, targets, modules_to_save, excluded)
        if isinstance(targets, list) and (taken := taken_for_experts(model, targets)):
            what = f"adapter.target_modules {min(taken)} is what peft takes for experts or routers in a {model.config.model_type}"
            raise UserError(f"{what}, also where layers are dense: leave it out, and set adapter.experts true to adapt experts")
    held = [(name, weight) for name, module in model.named_modules() if config.experts for weight in weights_of(module)]
    reached = [(name, weight) for name, weight in held if not re.fullmatch(excluded, name)]
    # peft takes the ends of names; all of it where texts reach only some, as in an Ernie's two mixtures.
    experts = {f"{name if reached != held else name.rpartition('.')[2]}.{weight}" for name, weight in reached}
    if config.experts and not experts:
        what = f"{type(model).__name__} has no experts that transformers computes by groups of tokens (grouped_mm)"
        raise UserError(f"adapter.experts is true, but {what}: leave it out")
    return LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if float(config.alpha).is_integer() else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=excluded or None,
        target_parameters=sorted(experts) or None,
        modules_to_save=modules_to_save or None,
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        ensure_weight_tying=is_tied,
    )


def _modules_to_save(model: PreTrainedModel, ends: list[str]) -> tuple[list[str], bool]:
    """Full names of the matching modules and of those tied to them, and whether any are tied.

    Full names, because peft would let `head` match `lm_head`.
    """
    named = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    matched: set[str] = set()
    for end in ends:
        found = [name for name in named if f".{name}".endswith(f".{end}")]
        if not found:
            existing = sorted({name.rpartition(".")[2] for name in named if not name.rpartition(".")[2].isdigit()} - {""})
            raise UserError(f"adapter.modules_to_save {end} matches no module; ends of names that exist: {', '.join(existing)}")
        matched |= set(found)
    tied: set[str] = set()
    for names in aliases(model).values():
        modules = {name.rpartition(".")[0] for name in names}
        if len(modules) > 1 and modules & matched:
            tied |= modules
    return sorted(matched | tied), bool(tied)


def _exclude(model: PreTrainedModel, exclude: list[str] | str | None, frozen: list[str]) -> str:
    """An expression of the modules that get no adapter: those that settings name, and what texts do not pass. A setting that
    names nothing is a `UserError`."""
    patterns = [exclude] if isinstance(exclude, str) else [rf"(.*\.)?{re.escape(end)}" for end in exclude or []]
    for pattern in patterns:
        if not match_names([name for name, _ in model.named_modules()], pattern, "adapter.exclude_modules"):
            raise UserError(f"adapter.exclude_modules {exclude} matches no module: name one that there is, or leave it out")
    patterns += sorted({re.escape(name.rpartition(".")[0]) for name in find_frozen(model, frozen)})
    if part := text_part(model):
        head = model.get_output_embeddings()
        kept = [rf"{re.escape(part)}\.", *(f"{re.escape(name)}$" for name, module in model.named_modules() if module is head)]
        patterns.append(f"(?!{'|'.join(kept)}).*")
    return "|".join(patterns)


def _check_targets(model: PreTrainedModel, targets: list[str] | str, modules_to_save: list[str], excluded: str) -> None:
    """Refuse an end or expression that matches nothing, or a layer that cannot be adapted."""
    from transformers.pytorch_utils import Conv1D

    named = dict(model.named_modules())
    linear = sorted({name.rpartition(".")[2] for name, module in named.items() if isinstance(module, (nn.Linear, Conv1D))})
    for end in [targets] if isinstance(targets, str) else targets:
        pattern = end if isinstance(targets, str) else rf"(.*\.)?{re.escape(end)}"
        matched = match_names([*named], pattern, "adapter.target_modules")
        found = [name for name in matched if not re.fullmatch(excluded, name)]
        if not found:
            why = "which adapter.exclude_modules or model.freeze names, or no text passes"
            out = f" besides {matched[0]}, {why}" if matched else ""
            raise UserError(f"adapter.target_modules {end} matches no module{out}; linear ones end in: {', '.join(linear)}")
        for name in found:
            what = f"adapter.target_modules {end} matches {name}"
            if not isinstance(named[name], (nn.Linear, Conv1D, nn.Embedding)):
                not_adapted = f"a {type(named[name]).__name__}, but an adapter goes on linear layers and embeddings"
                raise UserError(f"{what}, {not_adapted}; linear ones end in: {', '.join(linear)}")
            if any(f"{name}.".startswith(f"{saved}.") for saved in modules_to_save):
                raise UserError(f"{what}, which adapter.modules_to_save trains whole: choose one")


def _check_names(model: PreTrainedModel, what: str) -> None:
    """Check after the injection that plain peft would read all of the adapter from its file. Where transformers renames weights
    of older files, it renames new ones too: `mlp.shared_experts` in a Laguna."""
    stored = {name: model.get_parameter(own) for name, own in file_names(model).items() if ".lora_" in name}
    read: Any = private("convert_peft_adapter_state_dict_for_transformers")(model, model.peft_config["default"], stored)
    missing = {name.partition(".lora_")[0] for name in {*stored} - {*read}}
    if ends := sorted({".".join(name.split(".")[-2:]) for name in missing}):
        why = f"as transformers renames them in a {model.config.model_type}: name {', '.join(ends)} in adapter.exclude_modules"
        raise UserError(f"{what} adapts layers that peft would not read from its file again, {why}")


def _check_ties(model: PreTrainedModel, what: str) -> None:
    """Check after the injection that each tied weight is not adapted at all, or is trained in full under all its names as one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in aliases(model).values():
        adapted = [name for name in names if ".base_layer." in name and ".token_adapter." not in name]
        saved = [name for name in names if ".original_module." in name]
        if len(names) == 1 or not (adapted or saved):
            continue
        first = base_name((adapted + saved)[0])
        others = " and ".join(str(base_name(name)) for name in names if base_name(name) != first)
        if adapted:
            or_whole = "" if model.config.is_encoder_decoder else ", or train it whole by adapter.modules_to_save"
            why = f"the merged model would need two; leave it out of adapter.target_modules{or_whole}"
            raise UserError(f"{what} adapts {first}, which is one tied weight with {others}: {why}")
        copies = {name: name.replace(".original_module.", ".modules_to_save.default.") for name in names}
        # peft replaces all modules except the input embedding by linear layers, which breaks T5's three embeddings.
        owners = [[type(model.get_submodule(name.rpartition(".")[0])) for name in pair] for pair in copies.items()]
        same_kind = len(saved) == len(names) and all(old is new for old, new in owners)
        if not same_kind or len({id(parameters[new]) for new in copies.values()}) > 1:
            kept = f"a token embedding and an output head together, one of them named {' or '.join(TIED_NAMES)}"
            why = f"peft keeps only {kept}; leave it out of adapter.modules_to_save"
            raise UserError(f"{what} trains {first}, which is one tied weight with {others}: {why}")
