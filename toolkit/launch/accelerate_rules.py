"""Rules for the values of an accelerate YAML: which ones, alone or together, this toolkit refuses.

`accelerate_yaml` checks keys and types first. Each rule raises a `UserError` with the key, its value, the reason and the fix.
"""

from typing import Any

from toolkit.errors import UserError

SUPPORTED_TYPES = ("NO", "MULTI_GPU", "FSDP")
IGNORED_BY_FSDP2 = {
    "fsdp_forward_prefetch": "each block gathers the next one ahead anyway",
    "fsdp_backward_prefetch": "each block gathers the next one ahead anyway",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "FSDP2 has no such step",
    "fsdp_sharding_strategy": "its fsdp_reshard_after_forward is true for full shard, false for shard grad op",
}
FLAGS_ONLY = {"rdzv_backend": "static", "enable_cpu_affinity": False}
"""Keys that `accelerate launch` reads only from its command line, whatever the file says, with their defaults."""
HONOURED_BY_TORCHAO = ("fp8_backend", "fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim")


def check_rules(mapping: dict[str, Any], sections: dict[str, dict[str, Any]]) -> None:
    """Refuse values that would be ignored, fail later or train something else, by a `UserError`.

    `sections` holds the nested sections of `mapping` with full key names (`fsdp_version`, never `version`).
    """
    fsdp, parallelism, precision = sections["fsdp_config"], sections["parallelism_config"], mapping.get("mixed_precision", "no")
    _check_machines(mapping)
    _check_distributed_type(mapping)
    if precision not in (None, "no", "bf16", "fp8"):
        choices = "bf16, or 'no' for fp32 (in quotes, else YAML reads false), or fp8 with an fp8_config"
        raise UserError(f"mixed_precision is {precision!r}: write {choices}")
    if precision == "fp8":
        _check_float8(mapping, sections["fp8_config"], fsdp)
    elif sections["fp8_config"]:
        raise UserError("fp8_config has no effect without mixed_precision: fp8: write that, or leave it out")
    if mapping["distributed_type"] == "FSDP":
        _check_fsdp(fsdp, use_cpu=mapping.get("use_cpu", False))
    if parallelism:
        _check_parallelism(parallelism, fsdp, mapping)
    dynamo = sections["dynamo_config"]
    if str(dynamo.get("dynamo_backend", "NO")).upper() != "NO" and not dynamo.get("dynamo_use_regional_compilation"):
        raise UserError(
            "dynamo_config.dynamo_use_regional_compilation is not true: set it, blocks are compiled one by one (the loss and "
            "generation around them are not)"
        )


def _check_machines(mapping: dict[str, Any]) -> None:
    for key, default in FLAGS_ONLY.items():
        if mapping.get(key, default) not in (default, None):
            flag = f"--{key}" if default is False else f"--{key} {mapping[key]}"
            raise UserError(
                f"{key} is {mapping[key]}, which accelerate launch does not read from the file: give it {flag} instead"
            )
    for key, least in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0), ("main_process_port", 0)):
        if mapping.get(key) is not None and mapping[key] < least:
            raise UserError(f"{key} is {mapping[key]}: it must be at least {least}")
    machines = mapping.get("num_machines", 1)
    if mapping.get("machine_rank", 0) >= machines:
        raise UserError(f"machine_rank is {mapping['machine_rank']}, but num_machines is {machines}: the first machine is 0")
    if machines == 1:
        return
    if mapping.get("main_process_port") == 0:
        raise UserError("main_process_port is 0 (any free port), but num_machines is above 1: name one port for all machines")
    if not mapping.get("main_process_ip"):
        raise UserError(f"num_machines is {machines}, but main_process_ip is absent: give the address of the machine of rank 0")
    if mapping.get("num_processes", machines) % machines:
        raise UserError(
            f"num_processes is {mapping['num_processes']}, the sum over all machines, and cannot be shared equally by "
            f"num_machines ({machines}): make it a multiple"
        )


def _check_distributed_type(mapping: dict[str, Any]) -> None:
    kind = mapping.get("distributed_type", "absent")
    if kind not in SUPPORTED_TYPES:
        ways_out = {False: " ('NO' in quotes, else YAML reads false)", "MULTI_CPU": ", on CPUs MULTI_GPU with use_cpu: true"}
        raise UserError(f"distributed_type is {kind}: supported are {', '.join(SUPPORTED_TYPES)}{ways_out.get(kind, '')}")
    if kind == "NO" and mapping.get("num_processes", 1) > 1:
        raise UserError(f"num_processes is {mapping['num_processes']}, but distributed_type NO starts 1: write MULTI_GPU or FSDP")
    if kind != "FSDP" and mapping.get("fsdp_config"):
        raise UserError(f"fsdp_config is ignored under distributed_type {kind}: write distributed_type: FSDP, or leave it out")


def _check_float8(mapping: dict[str, Any], fp8: dict[str, Any], fsdp: dict[str, Any]) -> None:
    """Refuse float8 without torchao, and under what does not shard weights in float8: FSDP1 and DDP."""
    if str(fp8.get("fp8_backend", "")).upper() != "AO":
        given = f"is {fp8['fp8_backend']}" if "fp8_backend" in fp8 else "is absent, with which accelerate takes what is installed"
        raise UserError(f"fp8_config.backend {given}: write AO, which is torchao; others are not supported")
    for key in fp8:
        if key not in HONOURED_BY_TORCHAO:
            raise UserError(f"fp8_config.{key.removeprefix('fp8_')} has no effect with backend AO: leave it out")
    kind, gathers = mapping["distributed_type"], "fp8_enable_fsdp_float8_all_gather"
    if kind != "NO" and (kind != "FSDP" or fsdp.get("fsdp_version", 1) != 2) or mapping.get("use_cpu"):
        raise UserError(
            "mixed_precision is fp8, which works with distributed_type 'NO', or FSDP and fsdp_version 2, on GPUs: write bf16"
        )
    if kind == "NO" and fp8.get(gathers, True):
        given = "is true" if gathers in fp8 else "is absent, which accelerate takes for true"
        raise UserError(
            f"fp8_config.{gathers.removeprefix('fp8_')} {given}, and wraps weights for FSDP2's gathers, of which one process has "
            "none: set it to false"
        )
    if fsdp.get("fsdp_offload_params"):
        raise UserError(
            "fsdp_config.fsdp_offload_params is true with mixed_precision fp8: the scales of the weights are taken on the GPU, "
            "set it to false, or write bf16"
        )


def _check_fsdp(fsdp: dict[str, Any], *, use_cpu: bool) -> None:
    """Refuse values that the chosen FSDP version ignores, lacks or cannot handle."""
    version = fsdp.get("fsdp_version", 1)  # accelerate's default
    # Keys that have no effect.
    for key, reason in IGNORED_BY_FSDP2.items():
        if version == 2 and key in fsdp:
            raise UserError(f"fsdp_config.{key} has no effect under FSDP2 ({reason}): leave it out")
    policy = str(fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    owners = {"fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": "SIZE_BASED_WRAP"}
    for key, owner in owners.items():
        if fsdp.get(key) is not None and policy != owner:
            raise UserError(f"fsdp_config.{key} has no effect with fsdp_auto_wrap_policy {policy}: it serves {owner}")
    # Values that would gather or load the full model on every rank.
    if policy == "NO_WRAP":
        given = "is NO_WRAP" if "fsdp_auto_wrap_policy" in fsdp else "is absent, which accelerate takes for NO_WRAP"
        raise UserError(
            f"fsdp_config.fsdp_auto_wrap_policy {given}: the full model would be gathered at once, set it to "
            "TRANSFORMER_BASED_WRAP"
        )
    if fsdp.get("fsdp_cpu_ram_efficient_loading", True):
        given = "is true" if "fsdp_cpu_ram_efficient_loading" in fsdp else "is absent, which accelerate launch takes for true"
        raise UserError(f"fsdp_config.fsdp_cpu_ram_efficient_loading {given}: set it to false, weights are loaded without it")
    # Rules of one version.
    if version == 1:
        _check_fsdp1(fsdp, use_cpu=use_cpu)
    elif not isinstance(reshard := fsdp.get("fsdp_reshard_after_forward", True), bool):
        raise UserError(f"fsdp_config.fsdp_reshard_after_forward is {reshard}: under FSDP2 write true or false")


def _check_fsdp1(fsdp: dict[str, Any], *, use_cpu: bool) -> None:
    strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    reshard = str(fsdp.get("fsdp_reshard_after_forward", strategy)).upper()
    if reshard != strategy:
        raise UserError(
            f"fsdp_config.fsdp_reshard_after_forward is {reshard}, but under FSDP1 accelerate launch heeds only "
            f"fsdp_sharding_strategy, which is {strategy}: set that one, to the name of a strategy"
        )
    if not fsdp.get("fsdp_use_orig_params", True):
        raise UserError("fsdp_config.fsdp_use_orig_params is false: set it to true, freezing goes by parameter name")
    if use_cpu and fsdp.get("fsdp_sync_module_states", True):
        raise UserError("fsdp_config.fsdp_sync_module_states must be false with use_cpu: FSDP1 syncs through GPUs only")
    if use_cpu and strategy.startswith("HYBRID"):
        raise UserError(f"fsdp_config.fsdp_sharding_strategy is {strategy}: on CPU it silently shards nothing, use FULL_SHARD")


def _check_parallelism(sizes: dict[str, Any], fsdp: dict[str, Any], mapping: dict[str, Any]) -> None:
    """Refuse a mesh that the processes cannot form, or one with unsupported dimensions; an absent size is 1."""
    if mapping["distributed_type"] != "FSDP" or fsdp.get("fsdp_version", 1) != 2:
        raise UserError("parallelism_config works with distributed_type FSDP and fsdp_version 2 only: leave it out")
    reasons = {
        "tp": "accelerate imports a part of transformers (ReplicateParallel) that the installed version no longer has",
        "cp": "every rank takes rows of its own in this version",
        "sp": "it needs DeepSpeed, which is not supported",
    }
    for name, reason in reasons.items():
        if (size := sizes.get(key := f"parallelism_config_{name}_size", 1)) > 1:
            raise UserError(f"{key} is {size}: set it to 1, {reason}")
    replicate, shard = (sizes.get(f"parallelism_config_dp_{name}_size", 1) for name in ("replicate", "shard"))
    num_processes = mapping.get("num_processes")
    if replicate < 1 or shard < 2 or replicate * shard != (num_processes or replicate * shard):
        raise UserError(
            f"parallelism_config has dp_replicate_size {replicate} and dp_shard_size {shard}: their product must be "
            f"num_processes ({num_processes or 'which is not given'}), and dp_shard_size 2 or more"
        )
