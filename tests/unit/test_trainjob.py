"""`docs/launch/trainjob.yaml` is what Kubeflow Trainer's schema says, and its command is what a recipe takes."""

from __future__ import annotations

import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.support.launch import REPOSITORY
from tests.unit.test_docs import check_command

WRITTEN = yaml.safe_load((REPOSITORY / "docs/launch/trainjob.yaml").read_text())


def test_the_job_is_of_the_schema() -> None:
    job = TrainerV1alpha1TrainJob.from_dict(WRITTEN)
    assert job is not None and job.to_dict() == WRITTEN, "a key that the schema does not have is dropped"


def test_the_preset_is_for_the_jobs_machines_and_the_recipe_takes_the_flags(monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    trainer = WRITTEN["spec"]["trainer"]
    (variable,) = trainer["env"]
    assert variable["name"] == "TOOLKIT_ACCELERATE_YAML"
    preset = yaml.safe_load((REPOSITORY / variable["value"]).read_text())
    gpus = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert (preset["num_machines"], preset["num_processes"]) == (trainer["numNodes"], trainer["numNodes"] * gpus)
    check_command(["accelerate", "launch", "--config_file", variable["value"], *trainer["args"]])
