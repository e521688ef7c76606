"""All ranks are one run: they compare what they were started with, and a difference ends the run by its name.

Ranks of one launcher share a command line, but each machine has its own, and its own files and packages. What may differ is what
says where: addresses, ports, local paths, threads, workers.

What is compared, when, and what may differ, is a table in docs/process_groups.md.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import pprint
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.config.facts import facts_of
from toolkit.config.load import dotted_keys
from toolkit.config.paths import replace_local_paths
from toolkit.distributed.comm import gather_objects
from toolkit.errors import UserError
from toolkit.launch.environment import launched_with
from toolkit.launch.run_folder import SECRET_IN_URL

_PLACES_IN_YAML = frozenset(
    ("machine_rank", "main_process_ip", "main_process_port", "same_network", "rdzv_backend", "gpu_ids", "enable_cpu_affinity",
     "num_cpu_threads_per_process", "debug")
)  # fmt: skip
_OF_THE_LAUNCHER = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "FP8_")
_PLACES_IN_ENVIRONMENT = frozenset(
    f"ACCELERATE_{name}"
    for name in ("CPU_AFFINITY", "DEBUG_MODE", "BYPASS_DEVICE_MAP", "TORCH_DEVICE", "LOG_LEVEL", "ENABLE_RICH")
)
_PACKAGES = ("torch", "accelerate", "transformers", "peft")
_LIBRARIES = (*_PACKAGES, "datasets", "tokenizers")
_ENDINGS = (".json", ".jinja", ".txt", ".model", ".spm", ".tiktoken", ".py", ".safetensors")
"""Files of a folder that may decide a model, its tokenizer or its code."""
_START_BYTES, _NUM_BLOCKS, _BLOCK_BYTES = 1 << 20, 64, 1 << 14
"""Of a large file, its start, which holds the header of safetensors, and blocks at equal distances are hashed."""


def compare_ranks(facts: Mapping[str, Any]) -> None:
    """Check that every rank has the same facts, values by their names. Collective.

    The first difference from rank 0, in their order, is a `UserError` with both values on every rank.
    """
    # As `repr`, with the keys of mappings sorted, and without passwords.
    mine = {name: SECRET_IN_URL.sub("://***@", pprint.saferepr(value)) for name, value in facts.items()}
    digests = gather_objects((hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest(), socket.gethostname()))
    others = [number for number, (digest, _) in enumerate(digests) if digest != digests[0][0]]
    if not others:
        return
    all_facts = gather_objects(mine)
    first, theirs = all_facts[0], all_facts[others[0]]
    differing = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    (at_0, at_other), name = (facts.get(differing[0], "not set") for facts in (first, theirs)), differing[0]
    more = f"; {', '.join(differing[1:6])}{', …' if len(differing) > 6 else ''} differ too" if differing[1:] else ""
    raise UserError(
        f"{name} is {at_other:.200} on rank {others[0]} ({digests[others[0]][1]}), but {at_0:.200} on rank 0 ({digests[0][1]})"
        f"{more}: start all ranks with the same command, configs, files and versions",
        printed_by="run",
    )


def describe_launch(of_yaml: Mapping[str, Any]) -> dict[str, Any]:
    """What the accelerate YAML and the launcher's flags say, and the versions; by name, for `compare_ranks`."""
    facts = {f"{key} of the accelerate YAML": value for key, value in of_yaml.items() if key not in _PLACES_IN_YAML}
    flags = launched_with(_OF_THE_LAUNCHER)
    facts |= {name: value for name, value in flags.items() if name not in _PLACES_IN_ENVIRONMENT}
    facts |= {f"the version of {package}": importlib.metadata.version(package) for package in _PACKAGES}
    root = Path(__file__).resolve().parents[1]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))).hexdigest()[:16]
    return {**facts, "the code of the toolkit": code}


def installed_versions() -> dict[str, str]:
    """Versions of the toolkit, Python and the libraries, by name."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"toolkit": __version__, "python": platform.python_version(), **libraries}


def describe_config(config: Any) -> dict[str, Any]:
    """The fields of a run's config, and the contents of the local files that they name; by name, for `compare_ranks`. Rows are
    compared as tokens (`data.tokens.prepare`)."""
    known = facts_of(type(config))
    local: list[tuple[str, str]] = []

    def hide(key: str, path: str) -> str:
        local.append((key, os.path.expanduser(path)))
        return "a local path"

    hidden = replace_local_paths(config, hide)
    facts = {name: value for name, value in dotted_keys(hidden).items() if not known[name].per_rank}
    for key, path in local:
        for file, contents in describe_files(Path(path)).items() if known[key].path in ("path", "named") else ():
            name = f"{file} of {key}"  # two metrics may have files of one name
            facts[name] = f"{facts[name]}, {contents}" if name in facts else contents
    return facts


def describe_files(path: Path) -> dict[str, str]:
    """Size and hash of a file, or of those of a folder that may decide a model; empty for what is not there."""
    if path.is_file():
        return {"the file": _describe_file(path)}
    found = [*path.glob("*"), *path.glob("checkpoints/*/manifest.json")]  # a checkpoint's manifest has hashes of all its files
    files = sorted(file for file in found if file.suffix in _ENDINGS and file.is_file())
    return {str(file.relative_to(path)): _describe_file(file) for file in files}


def _describe_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_START_BYTES))
            for block in range(_NUM_BLOCKS if num_bytes > _START_BYTES else 0):
                file.seek((num_bytes - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    except OSError as error:  # whoever loads it reports it better
        return f"unreadable ({error.strerror})"
    return f"{num_bytes:,} bytes with the hash {digest.hexdigest()[:16]}"
