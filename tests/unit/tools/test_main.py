"""The command's name in its help; a standard output that fails: a full disk is one sentence, an early end is none; `init`, and
where recipes and presets are looked up."""

import os
import subprocess
import sys

import pytest

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from tests.support.report_runs import save_distinct_run
from toolkit.tools.main import main
from toolkit.tools.preset_runs import find_preset
from toolkit.tools.recipes import SHIPPED, find_shipped, init

FULL = "error: standard output cannot be written (No space left on device): make room there, or print to another place\n"


@pytest.mark.parametrize(("command", "options"), [("check", []), ("checkpoints", []), ("report", []), ("checkpoints", ["-u"])])
@pytest.mark.parametrize(("where", "expected"), [("full disk", (2, FULL)), ("closed pipe", (0, ""))])
def test_a_standard_output_that_fails(tmp_path, options, where, expected, command):
    run = save_distinct_run(tmp_path / "run")
    arguments = {
        "check": [str(REPOSITORY / "accelerate_configs" / "ddp_cpu.yaml")],
        "checkpoints": [str(run)],
        "report": ["--text", str(run)],
    }[command]
    reading, output = os.pipe() if where == "closed pipe" else (0, os.open("/dev/full", os.O_WRONLY))
    if reading:
        os.close(reading)
    program = [sys.executable, *options, "-m", "toolkit", command, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, timeout=600)
    os.close(output)
    assert (done.returncode, done.stderr) == expected


def test_it_starts_without_torch():
    code = "import sys, toolkit.tools.main, toolkit.checkpoint.find; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


@pytest.mark.parametrize(
    ("started", "name"), [("/env/bin/shardtune", "shardtune"), ("/toolkit/__main__.py", "python -m toolkit")]
)
def test_the_help_names_the_command_as_it_was_started(started, name, monkeypatch, capsys):
    for words in ([], ["train"]):
        monkeypatch.setattr(sys, "argv", [started, *words, "--help"])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out.startswith(" ".join(["usage:", name, *words]))


def test_a_projects_own_file_comes_first_and_else_the_toolkits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init(tmp_path, "t5")
    assert find_shipped("recipes", "t5.py") == tmp_path / "recipes" / "t5.py"
    assert find_shipped("recipes", "llm.py") == SHIPPED / "recipes" / "llm.py"
    (tmp_path / "accelerate_configs" / "ddp.yaml").unlink()
    assert find_preset("single") == tmp_path / "accelerate_configs" / "single.yaml"
    assert find_preset("ddp") == SHIPPED / "accelerate_configs" / "ddp.yaml"


def test_a_folder_that_cannot_be_made_is_one_sentence_and_a_link_to_nothing_is_not_written_over(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(init, tmp_path / "file", "t5").endswith("file cannot be made a project (Not a directory): name another folder")
    (tmp_path / "recipes").symlink_to(tmp_path / "gone")
    assert refusal(init, tmp_path, "t5").endswith("recipes exists already: name another folder, or remove it")
