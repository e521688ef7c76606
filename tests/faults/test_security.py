"""What a run reads is data, not code; names stay in their folders; secrets stay out of what a run writes.

Each case is a run of 2 real ranks that finds something hostile. The good outcome: one sentence, exit code 2 on every rank, and
the canary, a folder that the hostile code would make, is not there.
"""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import T5Config

from tests.faults.harness import make_the_manifest_match
from tests.faults.hostile import (
    CHECKPOINTS,
    FOLDERS,
    fill_with_code,
    run_by_manifest,
    with_unknown_model_code,
)
from tests.recipes.bad_input import ROWS, Case, attempt, check, write
from tests.support.launch import TIMEOUT_S, LaunchResult, launch
from tests.support.rank import PAGES
from tests.support.workbench import RECIPE
from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError
from toolkit.models.config import WEIGHTS_INDEX, load_model_config
from toolkit.objectives.seq2seq import Seq2Seq

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
def test_a_hostile_model_folder_is_refused(finished, tmp_path, name):
    here, canary = finished[0], tmp_path / "canary"
    other = shutil.copytree(here / "runs/run/export", tmp_path / "other")
    prepare, flags, sentence = FOLDERS[name]
    prepare(other, canary)
    result = attempt(here, Case(flags=f"--run.name refused {flags.replace('{other}', str(other))}"))
    assert not canary.exists()
    check(here, Case(sentence=sentence.replace("{other}", str(other))), result)


def test_the_index_of_a_hub_model_is_checked_too(tmp_path, monkeypatch):
    """transformers would find a shard `../x` from the hub's cache, if there is such a file."""
    index = tmp_path / WEIGHTS_INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"shared.weight": "../x.safetensors"}}))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: T5Config(decoder_start_token_id=0))
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, file, **_: str(tmp_path / file))
    with pytest.raises(UserError, match="of model.name_or_path someone/t5 names '../x.safetensors', not a "):
        load_model_config(ModelConfig(name_or_path="someone/t5"), Seq2Seq())


def test_code_and_pickles_beside_a_model_that_needs_none_are_not_run(finished, tmp_path):
    here, canary = finished[0], tmp_path / "canary"
    other = shutil.copytree(here / "runs/run/export", tmp_path / "other")
    fill_with_code(other, canary)
    result = attempt(here, Case(flags=f"--run.name harmless --model.name_or_path {other}"))
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    assert not canary.exists()


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
