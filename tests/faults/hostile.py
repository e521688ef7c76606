"""Checkpoints, model and adapter folders that somebody has put code, pickles or foreign names into."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex


class Attack:
    """Whoever unpickles it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


# --- Checkpoints, whose manifests are made to match.


def run_by_metadata(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(Attack(canary)))


def run_by_tensor(checkpoint: Path, canary: Path) -> None:
    put(checkpoint, "model.shared.weight", saved(Attack(canary)))


def run_by_random_state(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "rng-00001.safetensors").write_bytes(pickle.dumps(Attack(canary)))


def run_by_manifest(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(pickle.dumps(Attack(canary)))


def link_outside(checkpoint: Path, canary: Path) -> None:
    shard = checkpoint / "state/__0_0.distcp"
    shard.symlink_to(shard.rename(checkpoint.parent / "linked.distcp"))


def put(checkpoint: Path, name: str, content: bytes) -> None:
    """Have the metadata name other bytes for rank 0's part of a tensor."""
    metadata = pickle.loads((checkpoint / "state/.metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(name, metadata.state_dict_metadata[name].chunks[0].offsets)]
    with (checkpoint / "state" / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), file.write(content)
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(metadata))


def saved(value) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


LOADING = "checkpoint {run}/checkpoints/step-00000002 cannot be loaded: "
METADATA = LOADING + "{run}/checkpoints/step-00000002/state/.metadata is not a checkpoint metadata: "
SHARD = LOADING.replace("{run}", "{{run}}") + "{{run}}/checkpoints/step-00000002/state/__{}_0.distcp holds "
CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code in the metadata": (run_by_metadata, METADATA + "posix.mkdir is not allowed"),
    "code in a tensor": (run_by_tensor, SHARD.format(0) + "no tensor for model.shared.weight (UnpicklingError)"),
    "code in a random state": (
        run_by_random_state,
        "the random state {run}/checkpoints/step-00000002/rng-00001.safetensors cannot be restored (…): resume from another "
        "checkpoint",
    ),
    "code in the manifest": (
        run_by_manifest,
        "no checkpoint in {run}/checkpoints is valid (step-00000002/manifest.json cannot be read (…)): move them away…",
    ),
    "a link that leads outside": (
        link_outside,
        "no checkpoint in {run}/checkpoints is valid (… outside the checkpoint: state/__0_0.distcp is a link): …",
    ),
}
"""What is done to a checkpoint, given the canary too, and the sentence; `{run}` is the run folder, `…` stands for anything."""


# --- Folders of models and adapters.


def set_keys(file: Path, **values) -> None:
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | values))


def write_code(folder: Path, canary: Path) -> str:
    """A module that makes the canary when it is imported; returns its name."""
    source = f"import os\nos.mkdir({str(canary)!r})\n"
    classes = "Config", "Model", "Tokenizer"
    (folder / "hostile.py").write_text(source + "".join(f"class {name}:\n    pass\n" for name in classes))
    return "hostile"


def split_weights(folder: Path, shard: str) -> None:
    """An index in place of `model.safetensors`, whose one shard has the name given and exists if it is relative."""
    weights = folder / "model.safetensors"
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    weights.rename(folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_shard_above(folder: Path, canary: Path) -> None:
    split_weights(folder, "../shard.safetensors")


def with_pickled_shard(folder: Path, canary: Path) -> None:
    split_weights(folder, "shard.bin")
    (folder / "shard.bin").write_bytes(pickle.dumps(Attack(canary)))


def with_pickle_alone(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(canary)))


def with_named_pickle(folder: Path, canary: Path) -> None:
    with_pickle_alone(folder, canary)
    (folder / "pytorch_model.bin").rename(folder / "adapter_model.bin")
    set_keys(folder / "config.json", transformers_weights="adapter_model.bin")


def with_adapter(folder: Path, canary: Path) -> None:
    set_keys(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="elsewhere")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Attack(canary)))


def as_pickled_adapter(folder: Path, canary: Path) -> None:
    (folder / "config.json").unlink()
    with_adapter(folder, canary)


def with_unknown_model_code(folder: Path, canary: Path) -> None:
    module = write_code(folder, canary)
    auto_map = {"AutoConfig": f"{module}.Config", "AutoModelForSeq2SeqLM": f"{module}.Model"}
    set_keys(folder / "config.json", model_type="hostile", auto_map=auto_map, trust_remote_code=True)


def fill_with_code(folder: Path, canary: Path) -> None:
    """Everything that some loader of transformers knows to run, beside a model that it knows itself."""
    module = write_code(folder, canary)
    model = {"AutoConfig": f"{module}.Config", "AutoModelForSeq2SeqLM": f"{module}.Model"}
    set_keys(folder / "config.json", auto_map=model, trust_remote_code=True)
    tokenizer = {"AutoTokenizer": [None, f"{module}.Tokenizer"]}
    set_keys(folder / "tokenizer_config.json", auto_map=tokenizer, trust_remote_code=True)
    set_keys(folder / "generation_config.json", trust_remote_code=True, custom_generate=str(folder))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "hostile.py", folder / "custom_generate/generate.py")
    for name in ("training_args.bin", "pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "tokenizer.pkl", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Attack(canary)))


MODEL, START = "--model.name_or_path {other}", "--model.from_scratch true --model.init_from {other}"
INDEX = "the model.safetensors.index.json of "
NOT_BESIDE = ", not a safetensors file beside it: save it again"
NO_WEIGHTS = "model {other} has no loadable safetensors weights (…): give a folder with them, or model.from_scratch true …"
ADAPTER = "--model.from_scratch false --adapter.method lora --adapter.name_or_path {other}"
FOLDERS: dict[str, tuple[Callable[[Path, Path], None], str, str]] = {
    "shard above": (with_shard_above, MODEL, INDEX + f"model.name_or_path {{other}} names '../shard.safetensors'{NOT_BESIDE}"),
    "pickled shard": (with_pickled_shard, MODEL, INDEX + f"model.name_or_path {{other}} names 'shard.bin'{NOT_BESIDE}"),
    "shard above, to start from": (
        with_shard_above,
        START,
        INDEX + f"model.init_from {{other}} names '../shard.safetensors'{NOT_BESIDE}",
    ),
    "pickle alone": (with_pickle_alone, MODEL, NO_WEIGHTS),
    "pickle alone, to start from": (
        with_pickle_alone,
        START,
        "model.init_from {other} has no loadable safetensors weights (…)",
    ),
    "pickle that the config names": (
        with_named_pickle,
        MODEL,
        "the config.json of {other} names weights that are not read, transformers_weights 'adapter_model.bin': …",
    ),
    "adapter in the model's folder": (
        with_adapter,
        MODEL,
        "model.name_or_path {other} has an adapter_config.json too: give the model alone, …",
    ),
    "pickled adapter": (
        as_pickled_adapter,
        ADAPTER,
        "adapter.name_or_path {other} cannot be read ({other} does not appear to have a file named adapter_model.safetensors. …",
    ),
    "model of unknown code": (with_unknown_model_code, MODEL, "model.name_or_path {other} could not be read (…): give …"),
}
"""What is done to a copy `{other}` of an exported model, given the canary too, the flags and the sentence."""
