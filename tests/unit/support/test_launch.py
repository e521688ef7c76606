"""The launcher of the tests gives ranks the environment of the real one."""

import json
import os
import subprocess
import sys

from tests.support.launch import REPOSITORY, launch

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
