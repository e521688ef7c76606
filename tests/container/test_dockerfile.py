"""The steps of the `Dockerfile`, run in this order on a copy of the checkout. `make test-container`, as root on Debian."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY

STEP = re.compile(r"^(FROM|RUN|COPY|WORKDIR|ENV|CMD) (.*)$")


@pytest.mark.timeout(1800)
def test_the_steps_install_what_the_image_starts(tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    environment = dict(os.environ)
    folder, done = image, []
    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        if line.startswith("#"):
            continue
        found = STEP.match(line)
        assert found, line
        step, rest = found.groups()
        done.append(step)
        if step == "WORKDIR":
            folder = image / rest.lstrip("/")
            folder.mkdir(parents=True)
        elif step == "COPY":
            assert rest == ". ."
            left_out = (REPOSITORY / ".dockerignore").read_text().split()
            shutil.copytree(
                REPOSITORY, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*(Path(p).name for p in left_out))
            )
        elif step == "RUN":
            subprocess.run(["bash", "-ec", rest], cwd=folder, env=environment, check=True)
        elif step == "ENV":
            name, value = rest.split("=", 1)
            place = re.search(r"^WORKDIR (.*)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
            assert place
            environment[name] = value.replace(place[1], str(folder)).replace(f"${name}", environment[name])
        elif step == "CMD":
            ended = subprocess.run(
                ["bash", "-ec", " ".join(re.findall(r'"([^"]*)"', rest))], cwd=folder, env=environment, check=True
            )
            assert ended.returncode == 0
            listed = subprocess.run(
                ["bash", "-ec", "which shardtune"], cwd=folder, env=environment, capture_output=True, text=True
            )
            assert listed.stdout.strip() == str(folder / ".venv/bin/shardtune")
    assert done == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "ENV", "CMD"]
