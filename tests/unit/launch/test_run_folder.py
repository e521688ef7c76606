"""The folder of a run; and the launcher of the tests, which gives ranks the environment of the real one."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.launch import REPOSITORY, launch
from tests.support.locks import lock_held
from tests.support.refusals import refusal
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RunConfig, SummarizationConfig
from toolkit.errors import UserError
from toolkit.files.lock import release_locks
from toolkit.launch import run_folder
from toolkit.launch.run_folder import lock_run_folder, open_run_folder


def config(output_dir: Path | str, name: str = "run", files: str | list[str] | None = None) -> SummarizationConfig:
    run = RunConfig(output_dir=str(output_dir), name=name)
    return SummarizationConfig(model=ModelConfig(name_or_path="model"), data=DataConfig(source="jsonl", files=files), run=run)


def test_what_another_wrote_under_the_name_of_the_probe_does_not_pass(tmp_path, monkeypatch):
    write = run_folder._write_probe
    monkeypatch.setattr(run_folder, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(run_folder, "_write_probe", lambda folder, probe, _, *rest: write(folder, probe, "old", *rest))
    with pytest.raises(UserError, match=f"into {tmp_path}/run is not there in .+: name a folder on a file system that all nodes"):
        open_run_folder(config(tmp_path))
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../../b", "/x", "linked", "linked/x"])
def test_a_name_that_leads_out_is_refused_and_nothing_written(tmp_path, name):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"^run.name {name} leads to /.*, out of run.output_dir {tmp_path}/runs: give that"):
        open_run_folder(config(tmp_path / "runs", name))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["linked", "runs"]


def test_links_that_stay_inside_or_are_above_are_followed_and_a_new_folder_is_left_empty(tmp_path):
    (tmp_path / "disk/old").mkdir(parents=True)
    (tmp_path / "disk/run").symlink_to("old")
    (tmp_path / "runs").symlink_to("disk")
    for output_dir in (tmp_path / "runs", tmp_path / "new"):
        assert open_run_folder(config(output_dir)) == output_dir / "run"
        assert list((output_dir / "run").iterdir()) == []


def test_a_secret_in_a_url_is_refused_without_telling_it(tmp_path):
    with_secret = (
        "https://me:secret@host/rows.jsonl",
        ["rows.jsonl", "s3://key:secret@bucket/x.jsonl"],
        "https://secret@host/x.jsonl",
    )
    for files in with_secret:
        sentence = refusal(open_run_folder, config(tmp_path, files=files))
        assert sentence.startswith("data.files holds a URL with a password or token") and "secret" not in sentence
        assert list(tmp_path.iterdir()) == []
    for files in ("https://host/me@secret:1", "abfs://container@account.host/rows.jsonl"):
        assert open_run_folder(config(tmp_path, files=files))


def test_a_second_run_is_kept_out_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.3)
    sentence = f"another run is writing into {tmp_path}: wait for its end, or take another run.name"
    with lock_held(tmp_path / ".lock"):
        assert refusal(lock_run_folder, tmp_path) == sentence
    lock_run_folder(tmp_path)
    release_locks()
    with lock_held(tmp_path / ".lock"):
        pass
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))  # another user's; root may open every file
    monkeypatch.setattr(run_folder, "take_lock", denied)
    assert refusal(lock_run_folder, tmp_path).startswith(f"{tmp_path}/.lock cannot be opened (Permission denied): fix that, or ")


REPORT_SCRIPT = """
import json, os, sys
import helper_beside_the_script
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
names = [name for name in os.environ if name.split("_")[0] in ("ACCELERATE", "FSDP", "RANK", "LOCAL", "WORLD", "MASTER", "OMP")]
report = {"environment": {name: os.environ[name] for name in names}, "argv": sys.argv[1:], "main": __name__,
          "yaml": str(find_accelerate_yaml())}
with open(os.path.join(sys.argv[1], os.environ.get("RANK", "0") + ".json"), "w") as file:
    json.dump(report, file)
"""


def test_environment_is_that_of_accelerate_launch(tmp_path):
    """Against the real launcher, which also proves that the YAML is found from its command line."""
    script = tmp_path / "script.py"
    script.write_text(REPORT_SCRIPT)
    (tmp_path / "helper_beside_the_script.py").touch()
    preset = REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml"
    reports = []
    for way in ("real", "forked"):
        (tmp_path / way).mkdir()
        argv = [str(tmp_path / way), "--config_file=mine.yaml"]
        if way == "real":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", preset.name, str(script), *argv]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=preset.parent, env=environment, check=True, timeout=200)
        else:
            assert launch(script, argv, preset="fsdp2_cpu", timeout_s=120).returncodes == [0, 0]
        reports.append([json.loads((tmp_path / way / f"{rank}.json").read_text()) for rank in range(2)])
    for real, forked in zip(*reports, strict=True):
        assert real.pop("yaml") == str(preset)
        assert forked.pop("yaml").endswith("fsdp2_cpu.yaml")
        assert real["argv"].pop(0) != forked["argv"].pop(0)
        assert real["environment"].pop("MASTER_PORT") != forked["environment"].pop("MASTER_PORT")
        assert real == forked
