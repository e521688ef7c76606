"""Finds the accelerate YAML that launched this process, and checks it strictly.

`accelerate launch` turns the values it knows into environment variables and silently drops the rest: a misspelt key in
`fsdp_config`, or one that the chosen FSDP version does not use, has no effect and gives no message. So this module checks every
key. The known keys come from the installed accelerate's own parser.
"""

import functools
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from toolkit.config.messages import nearest, read_yaml
from toolkit.errors import UserError
from toolkit.launch.accelerate_rules import check_rules
from toolkit.private import private
from toolkit.variables import ACCELERATE_YAML, given, launch_arguments

SECTIONS = {
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
}
"""Nested sections with the prefix of their keys."""
UNSUPPORTED = {
    "deepspeed_config": "DeepSpeed",
    "megatron_lm_config": "Megatron-LM",
    "mpirun_config": "MULTI_CPU under MPI",
    **dict.fromkeys(("downcast_bf16", "commands", "command_file"), "TPUs"),
}
"""What a key serves, which `accelerate config` also writes empty; `tpu_*` serve TPUs too."""
REFUSED_FSDP_KEYS = {
    "fsdp_ignored_modules": "FSDP does not average the gradients of ignored modules, so the ranks would drift apart",
    "fsdp_activation_checkpointing_offload": "activations are checkpointed by transformers, which keeps them on the device",
}
SPELLING = {
    bool: "true or false, without quotes",
    int: "a whole number, without quotes",
    str: "text, in quotes if it looks like a number or a list",
    dict: "indented keys and values under it",
}


def find_accelerate_yaml() -> Path | None:
    """The file that `accelerate launch` read for this process; None if it read none, or did not start this process.

    The launcher hands over values but not the path, so its command line is read from among this process's parents.
    """
    path = given(ACCELERATE_YAML)  # for where no launching command line can be read: another launcher, or PID namespace
    return Path(path) if path else _file_of_launcher()


@functools.cache
def _file_of_launcher() -> Path | None:
    import psutil

    for parent in psutil.Process().parents():
        try:
            arguments, folder = launch_arguments(parent.cmdline()), parent.cwd()
        except psutil.Error:  # the parent has ended, or belongs to another user
            continue
        if arguments is not None:
            return _config_file(arguments, Path(folder))
    return None


def check_accelerate_yaml(path: Path, mixed_precision: str | None = None) -> dict[str, Any]:
    """Read the file and refuse everything that would be ignored, misread or fail later, by a `UserError` with the key and its
    value; returns the parsed mapping. The launcher's flag `mixed_precision` replaces the file's."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such accelerate config; accelerate_configs/ holds presets")
    mapping, _ = read_yaml(path, "num_processes: 2")
    mapping |= {"mixed_precision": mixed_precision} if mixed_precision else {}
    check_mapping(mapping, str(path))
    return mapping


def check_mapping(mapping: dict[str, Any], where: str) -> None:
    """As `check_accelerate_yaml`, of a file's content; the sentence begins with `where`."""
    try:
        kinds = {key: get_args(hint) or (hint,) for key, hint in get_type_hints(private("ClusterConfig")).items()}
        for key, value in mapping.items():
            if key == "gradient_accumulation_steps":
                derived = "train.global_batch_size_rows and train.micro_batch_size_rows"
                raise UserError(f"{key} is {value}: leave it out, accumulation is derived from {derived}")
            if key not in kinds:
                section = next((name for name, prefix in SECTIONS.items() if key in _section_kinds(prefix)), None)
                if section or key in _section_kinds(""):
                    way = f"indent it under {section}" if section else f"it is a flag of accelerate launch, write --{key} there"
                    raise UserError(f"unknown key {key}: {way}")
                raise UserError(f"unknown key {key}{nearest(str(key), kinds, cutoff=0.6)}")
            if serves := "TPUs" if key.startswith("tpu_") else UNSUPPORTED.get(key):
                if value and value != "no":
                    raise UserError(f"{key} is {value!r}: it serves {serves}, and is not supported; leave it out")
            elif key not in ("mixed_precision", "distributed_type", "compute_environment"):
                _check_value(key, value, kinds[key])
        sections = {name: _check_section(name, mapping.get(name) or {}) for name in SECTIONS}
        check_rules(mapping, sections)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _config_file(arguments: list[str], folder: Path) -> Path | None:
    """`--config_file`, relative to the launcher's folder, else accelerate's default file if the launcher reads it."""
    args = private("launch_command_parser")().parse_known_args(arguments)[0]
    if args.config_file is not None:
        return folder / args.config_file
    default = Path(private("default_config_file"))
    return default if default.is_file() and not args.cpu else None


def _check_section(name: str, section: dict[str, Any]) -> dict[str, Any]:
    """Check keys and types of a nested section; returns it with full key names."""
    prefix, kinds = SECTIONS[name], _section_kinds(SECTIONS[name])
    full: dict[str, Any] = {}
    for key, value in section.items():
        # The launcher adds a missing prefix, but not in parallelism_config.
        has_prefix = name == "parallelism_config" or str(key).startswith(prefix.rstrip("_"))
        long_key = str(key) if has_prefix else f"{prefix}{key}"
        if long_key in REFUSED_FSDP_KEYS:
            raise UserError(f"{name}.{key} cannot be set: {REFUSED_FSDP_KEYS[long_key]}; leave it out")
        if long_key not in kinds:
            near = long_key if long_key.startswith(prefix) else f"{prefix}{key}"
            raise UserError(f"unknown key {name}.{key}{nearest(near, kinds, cutoff=0.6)}")
        _check_value(f"{name}.{key}", value, kinds[long_key])
        full[long_key] = value
    return full


@functools.cache
def _section_kinds(prefix: str) -> dict[str, Any]:
    """The launcher's options with a prefix, each with its allowed types or the list of its choices."""
    from accelerate.utils import constants

    kinds: dict[str, Any] = {}
    for action in private("launch_command_parser")()._actions:
        if action.dest.startswith(prefix):
            is_bool = action.nargs == 0 or isinstance(action.default, bool) or action.default in ("true", "false")
            plain = (bool,) if is_bool else (int,) if action.type is int else (str, NoneType)
            kinds[action.dest] = list(action.choices) if action.choices else plain
    if prefix == "fsdp_":
        kinds |= {
            "fsdp_version": [1, 2],
            "fsdp_reshard_after_forward": [True, False, *constants.FSDP_SHARDING_STRATEGY],
            "fsdp_sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
            "fsdp_auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
            "fsdp_backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
            "fsdp_state_dict_type": constants.FSDP_STATE_DICT_TYPE,
        }
    return kinds


def _check_value(where: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type, or one that is not in the list. Case does not matter, as in accelerate."""
    if isinstance(kind, list):
        # Compare the type too: True == 1 in Python, but fsdp_version: true is not 1.
        if _spelt(value) not in [_spelt(choice) for choice in kind]:
            names = [choice if isinstance(choice, str) else str(choice).lower() for choice in kind]
            raise UserError(f"{where} is {value!r}: choose {', '.join(names)}")
    elif type(value) not in kind:
        raise UserError(f"{where} is {value!r}: write {SPELLING[kind[0]]}")


def _spelt(value: Any) -> tuple[type, Any]:
    return type(value), value.upper() if isinstance(value, str) else value
