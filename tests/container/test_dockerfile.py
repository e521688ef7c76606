"""The steps of the `Dockerfile`, run in this order on a copy of the checkout. `make test-container`, as root on Debian."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY


@pytest.mark.timeout(1800)
def test_the_steps_install_what_the_image_starts(tmp_path):
    folder, environment, done = tmp_path / "image", dict(os.environ), []
    folder.mkdir()

    def run(command: str) -> None:
        subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=True)

    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        if line.startswith("#"):
            continue
        step, _, rest = line.partition(" ")
        done.append(step)
        if step == "WORKDIR":
            place, folder = rest, folder / rest.lstrip("/")
            folder.mkdir(parents=True)
        elif step == "COPY":
            assert rest == ". ."
            left_out = [Path(name).name for name in (REPOSITORY / ".dockerignore").read_text().split()]
            shutil.copytree(REPOSITORY, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*left_out))
        elif step == "RUN":
            run(rest)
        elif step == "ENV":
            name, value = rest.split("=", 1)
            environment[name] = value.replace(place, str(folder)).replace(f"${name}", environment[name])
        elif step == "CMD":
            run(" ".join(re.findall(r'"([^"]*)"', rest)))
            assert shutil.which("shardtune", path=environment["PATH"]) == str(folder / ".venv/bin/shardtune")
    assert done == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "ENV", "CMD"]
