"""The strict reading of the accelerate YAML: each mistake sees its sentence; the presets are in order; the launcher of the tests
gives ranks the environment of the real one. And the folder of a run."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from benchmarks.presets.page import preset_header
from tests.support.launch import REPOSITORY, launch
from tests.support.locks import lock_held
from tests.support.refusals import refusal
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RunConfig, SummarizationConfig
from toolkit.errors import UserError
from toolkit.files.lock import release_locks
from toolkit.launch import run_folder
from toolkit.launch.accelerate_yaml import _config_file, check_accelerate_yaml
from toolkit.launch.run_folder import lock_run_folder, open_run_folder
from toolkit.variables import launch_arguments

PRESETS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
WRAPPED = {"fsdp_cpu_ram_efficient_loading": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def ddp(**top_level) -> dict:
    return {"distributed_type": "MULTI_GPU", "num_processes": 2, **top_level}


def fsdp(**section) -> dict:
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": section}


def fsdp1(**section) -> dict:
    return fsdp(**{"fsdp_version": 1, **WRAPPED, **section})


def fsdp2(**section) -> dict:
    return fsdp(**{"fsdp_version": 2, **WRAPPED, **section})


def fp8(**section) -> dict:
    return {"mixed_precision": "fp8", "fp8_config": section}


def mesh(**sizes: int) -> dict:
    return {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}


ON_CPU = {"use_cpu": True}
ONE = {"distributed_type": "NO", "num_processes": 1}
# More of them, by flags of the launcher: test_accelerator.py.
BROKEN = {
    # unknown keys
    "unknown key num_proceses: did you mean num_processes?": ddp(num_proceses=2),
    "unknown key fsdp_version: indent it under fsdp_config": ddp(fsdp_version=2),
    "unknown key max_restarts: it is a flag of accelerate launch, write --max_restarts there": ddp(max_restarts=3),
    "unknown key fsdp_config.fsdp_versoin: did you mean fsdp_version?": fsdp2(fsdp_versoin=2),
    "fsdp_config.reshard_after_foward: did you mean fsdp_reshard_after_forward?": fsdp2(reshard_after_foward=True),
    "did you mean parallelism_config_dp_shard_size?": fsdp2() | {"parallelism_config": {"dp_shard_size": 2}},
    "does not read from the file: give it --rdzv_backend c10d instead": ddp(rdzv_backend="c10d"),
    # keys that cannot work
    "fsdp_ignored_modules cannot be set: FSDP does not average the gradients": fsdp2(fsdp_ignored_modules="lm_head"),
    "fsdp_cpu_ram_efficient_loading is absent, which accelerate": fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"),
    "deepspeed_config is {'zero_stage': 3}: it serves DeepSpeed, and is not supported": ddp(deepspeed_config={"zero_stage": 3}),
    "dynamo_config.dynamo_use_regional_compilation is not true: set it": ddp(dynamo_config={"dynamo_backend": "INDUCTOR"}),
    "dynamo_config.dynamo_backend is 'INDUCTR': choose no, ": ddp(dynamo_config={"dynamo_backend": "INDUCTR"}),
    "tpu_use_cluster is True: it serves TPUs": ddp(tpu_use_cluster=True),
    # types and choices
    "num_processes is '2': write a whole number": ddp(num_processes="2"),
    "num_processes is True: write a whole number": ddp(num_processes=True),
    "num_processes is -1: it must be at least 1": ddp(num_processes=-1),
    "use_cpu is 'yes': write true or false": ddp(use_cpu="yes"),
    "gpu_ids is 0: write text, in quotes": ddp(gpu_ids=0),
    "fsdp_config is ['fsdp_version']: write indented keys and values": ddp(fsdp_config=["fsdp_version"]),
    "fsdp_config.fsdp_offload_params is 'true': write true or false, without quotes": fsdp2(fsdp_offload_params="true"),
    "fsdp_config.fsdp_version is True: choose 1, 2": fsdp2(fsdp_version=True),
    "is 'T5Block': choose TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP": fsdp2(fsdp_auto_wrap_policy="T5Block"),
    "is FULL_SHARD: under FSDP2 write true or false": fsdp2(fsdp_reshard_after_forward="FULL_SHARD"),
    "heeds only fsdp_sharding_strategy, which is FULL_SHARD": fsdp1(fsdp_reshard_after_forward="SHARD_GRAD_OP"),
    # keys that the chosen version or policy ignores
    "has no effect under FSDP2 (each block gathers the next one ahead anyway)": fsdp2(fsdp_forward_prefetch=False),
    "cannot be set: activations are checkpointed by transformers": fsdp2(activation_checkpointing_offload=True),
    "has no effect with fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP: it serves SIZE_BASED_WRAP": fsdp2(fsdp_min_num_params=9),
    "the full model would be gathered at once, set it to TRANSFORMER_BASED_WRAP": fsdp2(fsdp_auto_wrap_policy="no_wrap"),
    "fsdp_auto_wrap_policy is absent, which accelerate takes for NO_WRAP: the full model": fsdp(fsdp_version=2),
    "it serves TRANSFORMER_BASED_WRAP": fsdp2(
        fsdp_transformer_layer_cls_to_wrap="T5Block", fsdp_auto_wrap_policy="SIZE_BASED_WRAP"
    ),
    "fsdp_config is ignored under distributed_type MULTI_GPU": ddp(fsdp_config=WRAPPED),
    # FSDP1 on CPU, and what training needs of it
    "fsdp_sync_module_states must be false with use_cpu": fsdp1() | ON_CPU,
    "on CPU it silently shards nothing": fsdp1(fsdp_sync_module_states=False, fsdp_sharding_strategy="HYBRID_SHARD") | ON_CPU,
    "fsdp_use_orig_params is false: set it to true": fsdp1(fsdp_use_orig_params=False),
    # accumulation
    "is 4: leave it out, accumulation is derived from train.global_batch_size_rows": ddp(gradient_accumulation_steps=4),
    # precision
    "fp8_config has no effect without mixed_precision: fp8": ddp(fp8_config={"backend": "AO"}),
    "fp8_config.backend is absent, with which accelerate takes what is installed: write AO": fsdp2() | {"mixed_precision": "fp8"},
    "fp8_config.backend is TE: write AO, which is torchao": fsdp2() | fp8(backend="TE"),
    "fp8_config.margin has no effect with backend AO": fsdp2() | fp8(backend="AO", margin=0),
    "fp8_config.pad_inner_dim is 'yes': write true or false": fsdp2() | fp8(backend="AO", pad_inner_dim="yes"),
    "fp8, which works with distributed_type 'NO', or FSDP and fsdp_version 2, on GPUs: write bf16": ddp() | fp8(backend="AO"),
    "fp8_config.enable_fsdp_float8_all_gather is absent, which accelerate takes for true, and wraps": ONE | fp8(backend="AO"),
    "all_gather is true, and wraps weights for FSDP2's gathers": ONE | fp8(backend="AO", enable_fsdp_float8_all_gather=True),
    "fp8, which works with distributed_type 'NO', or FSDP and fsdp_version 2, on GPUs": fsdp2() | ON_CPU | fp8(backend="AO"),
    "fsdp_offload_params is true with mixed_precision fp8": fsdp2(fsdp_offload_params=True) | fp8(backend="AO"),
    "mixed_precision is False: write bf16, or 'no' for fp32 (in quotes, else YAML reads false)": ddp(mixed_precision=False),
    # distributed types, machines, meshes
    "distributed_type is absent: supported are NO, MULTI_GPU, FSDP": {"num_processes": 2},
    "distributed_type is False: supported are NO, MULTI_GPU, FSDP ('NO' in quotes": {"distributed_type": False},
    "supported are NO, MULTI_GPU, FSDP, on CPUs MULTI_GPU with use_cpu: true": ddp(distributed_type="MULTI_CPU"),
    "num_processes is 2, but distributed_type NO starts 1": ddp(distributed_type="NO"),
    "name one port for all machines": ddp(num_machines=2, main_process_port=0),
    "num_machines is 2, but main_process_ip is absent: give the address": ddp(num_machines=2, main_process_port=29500),
    "num_processes is 3, the sum over all machines, and cannot be shared equally by num_machines (2)": ddp(
        num_machines=2, main_process_ip="10.0.0.1", num_processes=3
    ),
    "machine_rank is 1, but num_machines is 1: the first machine is 0": ddp(machine_rank=1),
    "cp_size is 2: set it to 1, every rank takes rows of its own": fsdp2() | mesh(cp_size=2),
    "dp_replicate_size 4 and dp_shard_size 1: their product must be num_processes (4), and dp_shard_size 2 or more": fsdp2()
    | {"num_processes": 4}
    | mesh(dp_replicate_size=4),
    "dp_shard_size -2: their product must be": fsdp2() | {"num_processes": 4} | mesh(dp_replicate_size=-2, dp_shard_size=-2),
    "works with distributed_type FSDP and fsdp_version 2 only": fsdp1() | mesh(dp_shard_size=2),
}


def write(folder: Path, content: dict | list) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("sentence", BROKEN)
def test_each_mistake_sees_its_sentence(tmp_path, sentence):
    message = refusal(check_accelerate_yaml, path := write(tmp_path, BROKEN[sentence]))
    assert message.startswith(f"{path}: ") and sentence in message


def test_a_file_that_is_absent_or_no_mapping_sees_its_sentence(tmp_path):
    """More of them, which `read_yaml` finds: test_load.py."""
    absent, path = tmp_path / "absent.yaml", write(tmp_path, ["one", "two"])
    no_file = f"{absent}: there is no such accelerate config; accelerate_configs/ holds presets"
    assert refusal(check_accelerate_yaml, absent) == no_file
    assert refusal(check_accelerate_yaml, path) == f"{path} holds no keys and values: write them as in `num_processes: 2`"


@pytest.mark.parametrize(
    "mapping",
    [
        ddp(mixed_precision=None, main_process_port=None, dynamo_config={}),
        # as `accelerate config` writes them
        ddp(downcast_bf16="no", tpu_env=[], tpu_use_cluster=False, tpu_use_sudo=False, fsdp_config=None),
        fsdp1(fsdp_reshard_after_forward="FULL_SHARD", fsdp_backward_prefetch="backward_pre"),
        ONE | fp8(backend="AO", enable_fsdp_float8_all_gather=False),
        fsdp2() | fp8(fp8_backend="ao", enable_fsdp_float8_all_gather=False),
        fsdp(version=2, cpu_ram_efficient_loading=False, min_num_params=1000, auto_wrap_policy="SIZE_BASED_WRAP"),
        fsdp2(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_transformer_layer_cls_to_wrap=None),
        fsdp2() | {"num_processes": 4} | mesh(dp_replicate_size=2, dp_shard_size=2),
    ],
)
def test_what_works_passes_and_comes_back_as_written(tmp_path, mapping):
    assert check_accelerate_yaml(write(tmp_path, mapping)) == mapping


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_passes_and_has_its_header(path):
    check_accelerate_yaml(path)
    usage, quiet = preset_header(path)["Usage"], "--quiet " if path.stem.startswith("single") else ""
    assert usage.startswith(f"accelerate launch {quiet}--config_file accelerate_configs/{path.name} recipes/")


FILES = {
    "python /env/bin/accelerate launch --config_file sub/a.yaml t5.py --config_file other.yaml": "sub/a.yaml",
    "python -m accelerate.commands.launch --mixed_precision no --config-file=a.yaml t5.py": "a.yaml",
    "python /env/lib/accelerate/commands/launch.py t5.py --config_file other.yaml": "default_config.yaml",
    "python -m accelerate.commands.accelerate_cli launch t5.py": "default_config.yaml",
    "python /env/bin/accelerate-launch --cpu t5.py": None,
    "python /env/bin/accelerate config --config_file a.yaml": None,
    "python t5.py --config_file a.yaml": None,
    "": None,
}


@pytest.mark.parametrize("command", FILES)
def test_the_file_is_that_of_the_launchers_command_line_and_not_the_scripts(tmp_path, monkeypatch, command):
    """The whole way, with real processes, is below."""
    default, expected = tmp_path / "default_config.yaml", FILES[command]
    default.touch()
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(default))
    arguments = launch_arguments(command.split())
    assert (None if arguments is None else _config_file(arguments, tmp_path)) == (expected and tmp_path / expected)
    default.unlink()
    assert _config_file(["t5.py"], tmp_path) is None


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
    in_a_list = ["rows.jsonl", "s3://key:secret@bucket/x.jsonl"]
    for files in ("https://me:secret@host/rows.jsonl", in_a_list, "https://secret@host/x.jsonl"):
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
