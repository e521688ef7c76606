"""Private names, names of undocumented modules, and wordings of libraries that the core relies on.

`private` looks a name up at its use. Where a new version lacks it, the run that needs it ends with a sentence.
"""

import functools
import pkgutil
from importlib.metadata import version
from typing import Any

from toolkit.errors import UserError


def listed(*rows: tuple[str, str, str]) -> dict[str, tuple[str, str]]:
    """Name → its module or class, and what cannot work without it; from rows of package, names in it, and what."""
    dotted = [(f"{package}.{name}".rpartition("."), what) for package, names, what in rows for name in names.split()]
    return {name: (place, what) for (place, _, name), what in dotted}


NAMES = listed(
    ("torch.distributed", "distributed_c10d._world ProcessGroup._get_backend ProcessGroup._device_types", "the report of a hang"),
    ("torch._C._distributed_c10d", "Backend._get_sequence_number_for_group", "the report of a hang"),
    ("torch.distributed", "PrefixStore._underlying_non_prefix_store", "the search for lost ranks"),
    ("torch.distributed.distributed_c10d", "default_pg_timeout default_pg_nccl_timeout", "the timeout of every group"),
    ("torch._C", "_accelerator_getAllocatorSettings _accelerator_setAllocatorSettings", "GPU memory that does not fragment"),
    ("torch.distributed", "_shard.sharded_tensor.ShardedTensor", "a checkpoint under FSDP1"),
    ("torch.distributed.checkpoint", "FileSystemReader._slice_file", "reading a checkpoint one tensor at a time"),
    ("torch", "distributed.tensor._utils.compute_local_shape_and_global_offset nn.Module._apply", "loading only shards"),
    ("torch", "distributed.tensor.DTensor._local_tensor optim.AdamW._init_group", "the update of shards"),
    ("torch", "_foreach_norm _foreach_mul_", "clipping gradients"),
    ("torch", "_foreach_copy_ nn.Module._parameters", "weights in bf16 without FSDP"),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_param_group _fsdp_param_group.foreach_reduce", "the check of gradients"),
    ("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "an evaluation under FSDP2"),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_state.FSDPState._is_root", "an evaluation under FSDP2"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel._inter_node_pg", "reducing over the replicas of FSDP1's hybrid shards"),
    ("torch.ops.mkldnn", "_is_mkldnn_bf16_supported", "telling whether this CPU has bf16"),
    ("torch.utils", "checkpoint._RECOMPUTE", "selective activation checkpointing"),
    ("torch", "_inductor.list_mode_options _inductor.cpu_vec_isa.pick_vec_isa", "compiled blocks"),
    ("torch.utils", "_pytree.tree_flatten _pytree.tree_unflatten", "counting the FLOPs of a batch"),
    ("torch.fx.experimental", "_config.patch", "finding what a loss does not reach"),
    ("torch", "UntypedStorage._cdata", "telling which tensors share memory"),
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor", "sharding weights under fp8"),
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor._tensor", "sharding weights under fp8"),
    ("torch.distributed.tensor", "DTensor._spec", "sharding weights under fp8"),
    # GradientState has a `_reset_state` too.
    ("accelerate.commands", "launch.launch_command_parser launch._validate_launch_command", "reading an accelerate YAML"),
    ("accelerate.commands.config.config_args", "ClusterConfig default_config_file", "reading an accelerate YAML"),
    ("accelerate", "utils.other.get_free_port", "a run without `accelerate launch`"),
    ("accelerate", "state.AcceleratorState._reset_state", "a second run in one process"),
    ("accelerate", "PartialState._shared_state", "FSDP on a CPU"),
    ("peft.utils.transformers_weight_conversion", "convert_peft_config_for_transformers", "adapters on mixtures of experts"),
    ("peft.utils.transformers_weight_conversion", "convert_peft_adapter_state_dict_for_transformers", "reading adapters again"),
    ("transformers.integrations.moe", "_grouped_linear _batched_linear", "adapters on experts"),
    ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts._apply_gate", "adapters on experts"),
    # `_weight_conversions`, `_is_hf_initialized` and `_from_model_config` are only written.
    ("transformers", "PreTrainedConfig._attn_implementation", "choosing the attention"),
    ("transformers", "PreTrainedConfig._experts_implementation", "comparing mixtures of experts bit for bit"),
    ("transformers", "PreTrainedModel._can_record_outputs", "finding the routers of a mixture of experts"),
    ("transformers", "PreTrainedModel._supports_attention_backend PreTrainedModel._supports_flash_attn", "attention by document"),
    ("transformers.masking_utils", "causal_mask_function sliding_window_causal_mask_function", "attention by document"),
    ("transformers.masking_utils", "find_packed_sequence_indices remap_positions_for_packed_sequence and_masks", "packing rows"),
    ("transformers.masking_utils", "_ignore_causal_mask_sdpa _ignore_bidirectional_mask_sdpa", "a mask without host reads"),
    ("transformers", "PreTrainedModel.warn_if_padding_and_no_attention_mask", "a mask without host reads"),
    ("transformers", "AutoModelForCausalLM._model_mapping", "telling the kinds of models apart"),
    ("transformers", "PreTrainedModel._no_split_modules", "finding the repeated blocks"),
    ("transformers.initialization", "no_init_weights _is_hf_initialized", "building a model on the meta device"),
    ("transformers", "utils.hub.get_checkpoint_shard_files", "finding the files of the weights"),
    ("transformers.conversion_mapping", "get_model_conversion_mapping", "matching weights to files"),
    ("transformers.core_model_loading", "WeightConverter WeightRenaming rename_source_key", "matching weights to files"),
    ("transformers.core_model_loading", "dot_natural_key", "the order of experts in files"),
    ("transformers", "PreTrainedModel._keys_to_ignore_on_load_missing", "matching weights to files"),
    ("transformers", "PreTrainedModel._adjust_missing_and_unexpected_keys", "matching weights to files"),
    ("transformers", "PreTrainedModel._get_dtype_plan", "knowing which weights stay in fp32"),
    ("transformers.core_model_loading", "revert_weight_conversion _weight_conversions build_glob_alternation", "the export"),
    ("transformers", "modeling_utils.remove_tied_weights_from_state_dict PreTrainedModel._keys_to_ignore_on_save", "the export"),
    ("transformers", "GenerationConfig._get_default_generation_params", "a generation config like the base's"),
    ("transformers.utils.chat_template_utils", "_compile_jinja_template render_jinja_template", "rendering chats"),
    ("datasets.packaged_modules", "_PACKAGED_DATASETS_MODULES", "the check of data.source"),
    ("datasets", "data_files.FILES_TO_IGNORE data_files.sanitize_patterns", "the check of data.source"),
    ("datasets", "utils.metadata.MetadataConfigs", "the check of data.source"),
    ("evaluate", "EvaluationModule._hash", "a metric of eval.metrics"),
)

# What libraries write, where it is matched. The warnings and the first of torchao's lines are patterns.
NO_PROCESS_GROUP = "torch.distributed is disabled, unavailable or uninitialized"
VIEW_RETURNED = "FSDP2-wrapped module .* returned a view tensor"
ASKED_BY_PEFT = "`is_gradient_checkpointing` is deprecated|.*is a no-op"  # the latter as weights load on the meta device
VOCABULARY_TOO_SMALL = "vocabulary is not large enough"  # tokenizers raises nothing more specific
LOAD_REPORT = "LOAD REPORT"  # transformers' table of names that do not match
GLOO = "gloo"  # it raises plain RuntimeErrors
NOT_LOADED_BY_TORCHAO = r"Failed to load \S*/torchao/_C\w*(\.[\w-]+)*\.so: "
ENUM_OF_TORCHAO = "register_constant()"


def find(names: dict[str, tuple[str, str]], name: str, of: Any = None) -> Any:
    """What a listed name is in its module or class, which is imported now, or in the object `of`. If the installed version has no
    such name, that is a `UserError`."""
    place, what = names[name]
    try:
        return getattr(_home(place) if of is None else of, name)
    except (ImportError, AttributeError):
        library = place.partition(".")[0]
        found = f"{library} {version(library)} has no {place}.{name}"
        raise UserError(f"{found}: {what} cannot work; take the version of {library} in constraints.txt") from None


_home = functools.cache(pkgutil.resolve_name)
private = functools.partial(find, NAMES)
