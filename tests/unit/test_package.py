"""What `import toolkit` offers, what it does not import, and where it reads the environment. Every listed name of a library
exists, a missing one ends a run with its sentence, and no private name is used unlisted. A planted fault still finds the code
that it changes; `tests/distributed/test_planted_faults.py` shows that it is caught."""

import ast
import importlib.util
import inspect
import logging
import pkgutil
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import toolkit
from tests.planting.faults import FAULTS
from tests.planting.plant import planted
from tests.support.launch import REPOSITORY
from tests.support.workbench import call_toolkit
from toolkit import private
from toolkit.errors import UserError
from toolkit.tools import private as of_tools

LISTED = """
import sys, toolkit
assert {*toolkit.__all__} <= {*dir(toolkit)}, dir(toolkit)
print(*(name for name in ("torch", "transformers", "datasets", "jsonargparse") if name in sys.modules))
"""

ELSEWHERE = """
import os, runpy, signal, sys
_, sys.platform, *sys.argv = sys.argv
for place, name in ((os, "sched_getaffinity"), (os, "pidfd_open"), (signal, "SIGHUP")):
    delattr(place, name)
sys.modules["fcntl"] = sys.modules["resource"] = None  # their import fails
(runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "platform", "system"),
    [
        *((program, "darwin", "macOS") for program in ("toolkit train run.yaml", "recipes/llm.py --help")),
        *(("toolkit.training.finetune", *named) for named in (("win32", "Windows"), ("freebsd14", "freebsd14"))),
    ],
)
def test_another_system_than_linux_gets_one_sentence(program, platform, system):
    words = [sys.executable, "-c", ELSEWHERE, platform, *program.split()]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    sentence = f"error: the toolkit needs Linux, and this is {system}: use a Linux machine, a container, or WSL 2\n"
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", sentence, 2)


def test_the_public_names_are_listed_and_imported_at_their_first_use():
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "", listed.stdout
    for name in toolkit.__all__:
        assert getattr(toolkit, name).__name__ == name
    assert toolkit.finetune.__module__ == "toolkit.training.finetune"
    assert (TOOLKIT / "py.typed").exists(), "its types are used"
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == toolkit.__version__


def test_two_files_read_the_environment():
    reads = re.compile(r"\bos\.(environ|getenv|putenv)|from os import .*env")
    found = {str(path.relative_to(TOOLKIT)) for path in TOOLKIT.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))}
    assert found == {"variables.py", "launch/environment.py"}


def test_lower_folders_import_the_interface_of_objectives_for_type_checkers_only():
    """import-linter cannot tell: its contracts leave these imports out."""
    for path in TOOLKIT.rglob("*.py"):
        if path.relative_to(TOOLKIT).parts[0] not in ("objectives", "training", "tools"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
            assert "from toolkit.objectives" not in ast.unparse(tree), path


def test_what_torchao_prints_at_its_import_is_left_out_and_other_messages_of_its_loggers_pass():
    words = [sys.executable, "-c", "import toolkit.errors, torchao"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    for logger, message, *arguments in (
        ("torchao", "Failed to load the config: no such file"),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version"),
        ("torch.utils._pytree", "something else"),
        ("torch.utils._pytree", "%s is an Enum subclass. Calling register_constant() on it is deprecated", signal.Signals),
    ):
        record = logging.LogRecord(logger, logging.WARNING, __file__, 1, message, tuple(arguments), None)
        assert logging.getLogger(logger).filters and logging.getLogger(logger).filter(record)


ALL = private.NAMES | of_tools.NAMES
TOOLKIT = Path(private.__file__).parent
LISTS = [Path(private.__file__), Path(of_tools.__file__)]
OF_PYTHON = {"_replace", "_exit", "_run_exitfuncs", "_current_frames", "_actions", "_shutdown"}
"""Private names of the standard library, and a method of named tuples."""
WRITTEN = {
    private.NO_PROCESS_GROUP: "torch/distributed/checkpoint/state_dict_loader.py",
    private.VIEW_RETURNED.partition(" .* ")[2]: "torch/distributed/fsdp/_fully_shard/_fsdp_state.py",
    private.ASKED_BY_PEFT.partition("|")[0]: "transformers/modeling_utils.py",
    private.ASKED_BY_PEFT.partition(".*")[2]: "torch/nn/modules/module.py",
    private.VOCABULARY_TOO_SMALL: "tokenizers/tokenizers.abi3.so",
    private.LOAD_REPORT: "transformers/utils/loading_report.py",
    private.ENUM_OF_TORCHAO: "torch/utils/_pytree.py",
    private.NOT_LOADED_BY_TORCHAO.partition(r" \S")[0]: "torchao/__init__.py",
    of_tools.FAKE_POINTER_READ: "torch/lib/libc10.so",
}
"""What libraries write, and the file that has it."""


@pytest.mark.parametrize("name", ALL)
def test_the_installed_version_has_the_name(name):
    home = pkgutil.resolve_name(ALL[name][0])
    if hasattr(home, name):
        return
    # An attribute that objects of the class get, or that the module's functions look for on a tensor.
    source = inspect.getsource(inspect.getmodule(home))
    assert re.search(rf"(\w\.{name}\b|^    {name}: |getattr\(\w+, \"{name}\")", source, re.MULTILINE), f"{ALL[name][0]}.{name}"


def test_a_missing_name_ends_the_run_with_a_sentence_and_a_command_with_2(tmp_path, monkeypatch, capsys):
    end = "cannot work; take the version of torch in constraints.txt$"
    sentence = rf"^torch {re.escape(version('torch'))} has no torch.{{}}: {{}} {end}"
    with pytest.raises(UserError, match=sentence.format("_foreach_norm", "clipping gradients")):
        of_tools.private("_foreach_norm", object())
    with pytest.raises(UserError, match=sentence.format("no_such_module.name", "nothing")):
        private.find(private.listed(("torch", "no_such_module.name", "nothing")), "name")
    (tmp_path / "a.yaml").write_text("distributed_type: 'NO'\n")
    monkeypatch.delattr("accelerate.commands.config.config_args.ClusterConfig")
    assert call_toolkit("check", tmp_path / "a.yaml") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "ClusterConfig: reading an accelerate YAML cannot work; " in err


@pytest.mark.parametrize("wording", WRITTEN)
def test_the_installed_version_writes_the_wording(wording):
    spec = importlib.util.find_spec(WRITTEN[wording].partition("/")[0])
    assert wording.encode() in (Path(spec.origin).parents[1] / WRITTEN[wording]).read_bytes()


def test_every_private_name_is_listed_and_every_listed_one_used():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in TOOLKIT.rglob("*.py") if path not in LISTS}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    texts = {node.value for _, node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    stored = [node for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert not ALL.keys() - texts - {node.attr for node in stored}, "listed, but used nowhere"

    own = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for _, node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in stored if ast.unparse(node.value) == "self" and node.attr not in ALL}
    own |= {str(node.args[1].value) for _, node in nodes if _is_call_of("setattr", node)}
    places = {part for place, _ in ALL.values() for part in place.split(".")}
    unlisted = [
        f"{path.relative_to(TOOLKIT)}:{node.lineno}: {name}"
        for path, node in nodes
        for name in _private_names(node)
        if name not in own | places | OF_PYTHON
    ]
    assert not unlisted, unlisted


def _is_call_of(function: str, node) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    return is_call and isinstance(node.args[1], ast.Constant)


def _private_names(node) -> list[str]:
    """Private names that this node reads, imports or looks for, and those that it writes but nobody has listed."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not (isinstance(node.ctx, ast.Store) and node.attr in ALL):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in ("toolkit", "__future__"):
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names for part in alias.name.split(".")]
    elif _is_call_of("getattr", node) or (_is_call_of("hasattr", node) and node.args[1].value not in ALL):
        names = [node.args[1].value]
    return [name for name in names if name.startswith("_") and not name.endswith("__")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_its_code(name):
    with planted(name):
        pass
