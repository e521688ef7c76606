"""What a run reads is data, not code; names stay in their folders; secrets stay out of what a run writes.

Each case is a run of 2 real ranks that finds something hostile. The good outcome: one sentence, exit code 2 on every rank, and
the canary, a folder that the hostile code would make, is not there.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import T5Config

from tests.faults.harness import make_the_manifest_match
from tests.recipes.test_bad_input import ROWS, Case, attempt, check, write
from tests.support.launch import TIMEOUT_S, LaunchResult, launch
from tests.support.rank import PAGES
from tests.support.workbench import RECIPE
from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError
from toolkit.models.config import WEIGHTS_INDEX, load_model_config
from toolkit.objectives.seq2seq import Seq2Seq


class Attack:
    """Whoever unpickles it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Attack(canary))


# --- Checkpoints, whose manifests are made to match.


def run_by_manifest(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(pickled(canary))


def link_outside(checkpoint: Path, canary: Path) -> None:
    shard = checkpoint / "state/__0_0.distcp"
    shard.symlink_to(shard.rename(checkpoint.parent / "linked.distcp"))


def run_by_tensor(checkpoint: Path, canary: Path) -> None:
    """The metadata names other bytes for rank 0's part of a tensor."""
    name, content = "model.shared.weight", BytesIO()
    torch.save(Attack(canary), content)
    metadata = pickle.loads((checkpoint / "state/.metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(name, metadata.state_dict_metadata[name].chunks[0].offsets)]
    with (checkpoint / "state" / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), file.write(content.getvalue())
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(metadata))


LOADING = "checkpoint {run}/checkpoints/step-00000002 cannot be loaded: "
METADATA = LOADING + "{run}/checkpoints/step-00000002/state/.metadata is not a checkpoint metadata: "
SHARD = LOADING.replace("{run}", "{{run}}") + "{{run}}/checkpoints/step-00000002/state/__{}_0.distcp holds "
CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code in the metadata": (
        lambda checkpoint, canary: (checkpoint / "state/.metadata").write_bytes(pickled(canary)),
        METADATA + "posix.mkdir is not allowed",
    ),
    "code in a tensor": (run_by_tensor, SHARD.format(0) + "no tensor for model.shared.weight (UnpicklingError)"),
    "code in a random state": (
        lambda checkpoint, canary: (checkpoint / "rng-00001.safetensors").write_bytes(pickled(canary)),
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


def with_split_weights(folder: Path, canary: Path, shard: str = "../shard.safetensors") -> None:
    """An index in place of `model.safetensors`, whose one shard has the name given and exists if it is relative."""
    weights = folder / "model.safetensors"
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    weights.rename(folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_pickled_shard(folder: Path, canary: Path) -> None:
    with_split_weights(folder, canary, "shard.bin")
    (folder / "shard.bin").write_bytes(pickled(canary))


def with_pickle_alone(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(canary))


def with_named_pickle(folder: Path, canary: Path) -> None:
    with_pickle_alone(folder, canary)
    (folder / "pytorch_model.bin").rename(folder / "adapter_model.bin")
    set_keys(folder / "config.json", transformers_weights="adapter_model.bin")


def with_adapter(folder: Path, canary: Path) -> None:
    set_keys(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="elsewhere")
    (folder / "adapter_model.bin").write_bytes(pickled(canary))


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
        (folder / name).write_bytes(pickled(canary))


MODEL, START = "--model.name_or_path {other}", "--model.from_scratch true --model.init_from {other}"
INDEX = "the model.safetensors.index.json of "
NOT_BESIDE = ", not a safetensors file beside it: save it again"
NO_WEIGHTS = "model {other} has no loadable safetensors weights (…): give a folder with them, or model.from_scratch true …"
ADAPTER = "--model.from_scratch false --adapter.method lora --adapter.name_or_path {other}"
FOLDERS: dict[str, tuple[Callable[[Path, Path], None], str, str]] = {
    "shard above": (with_split_weights, MODEL, INDEX + f"model.name_or_path {{other}} names '../shard.safetensors'{NOT_BESIDE}"),
    "pickled shard": (with_pickled_shard, MODEL, INDEX + f"model.name_or_path {{other}} names 'shard.bin'{NOT_BESIDE}"),
    "shard above, to start from": (
        with_split_weights,
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
    "code and pickles beside a model that needs none": (fill_with_code, MODEL, ""),
    "model of unknown code": (with_unknown_model_code, MODEL, "model.name_or_path {other} could not be read (…): give …"),
}
"""What is done to a copy `{other}` of an exported model, given the canary too, flags and sentence; "" where it trains."""

# --- The tests.

SECRETS = {
    name: f"planted-{name.lower().replace('_', '-')}-4711"
    for name in (
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "CLEARML_API_SECRET_KEY",
        "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY", "AWS_SECRET_ACCESS_KEY",
    )
}  # fmt: skip
STEP = Path("checkpoints/step-00000002")
FROM_SCRATCH = "--model.from_scratch true"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, LaunchResult]:
    """A folder with a run of two steps that had secrets in its environment; and how it went."""
    here = tmp_path_factory.mktemp("secure")
    write(here, {"rows.jsonl": ROWS})
    with patch.dict(os.environ, SECRETS | PAGES):
        result = attempt(here, Case(flags=f"{FROM_SCRATCH} --log_row_ids true"))
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    return here, result


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused(finished, tmp_path, name):
    here, canary = finished[0], tmp_path / "canary"
    run = shutil.copytree(here / "runs/run", here / "runs" / name.replace(" ", "_"))
    tamper, sentence = CHECKPOINTS[name]
    tamper(run / STEP, canary)
    if tamper is not run_by_manifest:
        make_the_manifest_match(run / STEP)
    flags = f"{FROM_SCRATCH} --train.max_steps 3 --run.name {run.name}"
    result = attempt(here, Case(flags=flags))
    assert not canary.exists()
    check(here, Case(sentence=sentence.replace("{run}", str(run))), result)
    assert not list((run / "checkpoints").glob("step-00000003*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_model_folder_is_refused_or_its_code_not_run(finished, tmp_path, name):
    here, canary = finished[0], tmp_path / "canary"
    other = shutil.copytree(here / "runs/run/export", tmp_path / "other")
    prepare, flags, sentence = FOLDERS[name]
    prepare(other, canary)
    run_name = "refused" if sentence else "harmless"
    result = attempt(here, Case(flags=f"--run.name {run_name} {flags.replace('{other}', str(other))}"))
    assert not canary.exists()
    if sentence:
        check(here, Case(sentence=sentence.replace("{other}", str(other))), result)
    else:
        assert result.returncodes == [0, 0], result.stderr[-3000:]


def test_the_index_of_a_hub_model_is_checked_too(tmp_path, monkeypatch):
    """transformers would find a shard `../x` from the hub's cache, if there is such a file."""
    index = tmp_path / WEIGHTS_INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"shared.weight": "../x.safetensors"}}))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: T5Config(decoder_start_token_id=0))
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, file, **_: str(tmp_path / file))
    with pytest.raises(UserError, match="of model.name_or_path someone/t5 names '../x.safetensors', not a "):
        load_model_config(ModelConfig(name_or_path="someone/t5"), Seq2Seq())


def test_the_code_would_run_where_it_is_trusted(finished, tmp_path):
    """Or the other tests would prove nothing."""
    here, canary = finished[0], tmp_path / "canary"
    other = shutil.copytree(here / "runs/run/export", tmp_path / "other")
    with_unknown_model_code(other, canary)
    flags = f"--run.name trusted --model.name_or_path {other} --model.trust_remote_code true"
    with patch.dict(os.environ, {"HF_MODULES_CACHE": str(tmp_path / "modules")}):
        result = attempt(here, Case(flags=flags))
    assert any(result.returncodes) and canary.is_dir(), result.stderr[-3000:]


def test_yaml_makes_no_objects(tmp_path):
    canary, config = tmp_path / "canary", tmp_path / "run.yaml"
    config.write_text(f"model:\n  name_or_path: !!python/object/apply:os.mkdir ['{canary}']\ndata:\n  source: not/read\n")
    result = launch(RECIPE, ["--config", str(config)], preset="fsdp2_cpu", timeout_s=TIMEOUT_S)
    assert not canary.exists()
    sentence = "{here}/run.yaml, line 2: broken YAML (could not determine a constructor for the tag …"
    check(tmp_path, Case(sentence=sentence), result)


def test_secrets_of_the_environment_are_not_written_or_printed(finished):
    here, result = finished
    with patch.dict(os.environ, SECRETS):
        refused = attempt(here, Case(flags=f"{FROM_SCRATCH} --optim.lr 0.5"))
        (here / "runs/crashed/metrics.jsonl").mkdir(parents=True)
        crashed = attempt(here, Case(flags=f"{FROM_SCRATCH} --run.name crashed"))
    assert refused.returncodes == [2, 2] and all(crashed.returncodes)
    printed = "".join(r.stdout + r.stderr for r in (result, refused, crashed)).encode()
    written = {path: path.read_bytes() for path in (here / "runs/run").rglob("*") if path.is_file()}
    written |= {path: path.read_bytes() for path in (here / "cache").rglob("*") if path.is_file()}
    assert len(written) > 20 and any(b"t5" in content for content in written.values())
    assert {"report.html", "curves.png"} <= {path.name for path in written}
    for secret in SECRETS.values():
        assert secret.encode() not in printed
        assert [path for path, content in written.items() if secret.encode() in content] == []
