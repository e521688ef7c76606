"""trackio, in its local store: its database has each figure of `metrics.jsonl` once, in one run; failures."""

import json
import subprocess
import sys

import pytest

from tests.support.workbench import Workbench
from tests.trackers.checks import Points, check_points, check_refused


def load(bench: Workbench, name: str) -> tuple[Points, int]:
    """The figures of the runs with a name, and how many runs these are."""
    script = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage\n"
        "names = [run['name'] for run in SQLiteStorage.get_run_records('shelf')]\n"
        "print(json.dumps([SQLiteStorage.get_logs('shelf', sys.argv[1]), names]))"
    )
    done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
    logs, names = json.loads(done.stdout.splitlines()[-1])
    points: Points = {}
    for log in logs:
        for key, value in log.items():
            if "/" in key:
                points.setdefault(key, []).append((log["step"], value))
    return points, names.count(name)


@pytest.mark.parametrize("name", ["one", "killed"])
def test_every_loss_is_there_once_in_one_run(logged, name):
    points, num_runs = load(logged, name)
    check_points(logged, name, points)
    assert num_runs == 1


def test_a_project_name_that_it_refuses_is_one_sentence_on_all_ranks(bench):
    why = check_refused(bench, "trackio", tracking__project_name="registry-x")
    assert why.startswith("Project name 'registry-x' is not allowed: ")
