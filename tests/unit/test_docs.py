"""README and docs hold: commands parse as typed, and the files, functions, tests and links that they name exist."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from mnist_config import MnistConfig, check_mnist_config
from packaging.requirements import Requirement

from tests.support.launch import REPOSITORY
from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.config.validate import check_config
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.models.lora import check_adapter_config
from toolkit.tools import main as cli
from toolkit.tools.compare.runs import load_preset
from toolkit.tools.export import MAY_CHANGE

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "accelerate_configs/README.md"]
PAGES += ["toolkit/config/migrating.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"(?<![a-z0-9_])[A-Z][A-Z0-9_]*(?![a-z0-9_])")
"""What a reader replaces: FOLDER, RUN.yaml, /shared/MODEL, N. Shell variables are replaced by the shell."""
FOLDERS = ("toolkit", "tests", "recipes", "benchmarks", "docs", "accelerate_configs")
MODULES = ("pytest", "venv", "pip", "build", "twine")
"""What `python -m` may name beside files of the repository."""
SHELL = {"git", "cd", "source", "for", "echo", "done", "export", "head", "wait", "trap", "launcher=$!"}
"""First words of lines in a `sh` block that need no check of ours."""
RECIPES: dict[str, tuple[Any, Any]] = {
    "t5.py": (SummarizationConfig, check_config),
    "llm.py": (LLMConfig, check_config),
    "mnist.py": (MnistConfig, check_mnist_config),
}
EXAMPLES = {"t5.py": "t5_functions", "llm.py": "llm_stdlib", "mnist.py": "mnist_digits"}
"""The run YAML in the place of RUN.yaml."""


@pytest.fixture(autouse=True)
def _at_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse_as_typed(page: str) -> None:
    for command in list_commands((REPOSITORY / page).read_text()):
        try:
            check_command(command)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: {shlex.join(command)}\n{error}")


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_exists(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    missing = [name for name in INLINE.findall(FENCE.sub("", text)) if not name_exists(name)]
    missing += [link for link in LINK.findall(text) if not link_leads_somewhere(link, REPOSITORY / page)]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_opens_with_what_it_is_for_and_has_a_place_in_the_site(page: str) -> None:
    title, opening = (REPOSITORY / page).read_text().split("\n\n", 2)[:2]
    assert title.startswith("# ") and re.match(r"(Read|Use|Look)\b.*[.:]$", opening, re.DOTALL)
    assert f'"{page.removesuffix(".md")}"' in (REPOSITORY / "docs/conf.py").read_text()


def test_the_lines_of_readme_that_write_rows_do(tmp_path: Path) -> None:
    blocks = "\n".join(block for _, block in FENCE.findall((REPOSITORY / "README.md").read_text()))
    lines = re.findall(r"^(?:echo|for) .*>.*$", blocks, re.MULTILINE)
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, check=True)
    rows = list(csv.DictReader((tmp_path / "articles.csv").open()))
    assert len(rows) == 400 and rows[6] == {"article": "A long article about the number 7.", "summary": "About 7"}
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").open()]
    assert len(chats) == 200 and [turn["role"] for turn in chats[6]["messages"]] == ["user", "assistant"]
    assert chats[6]["messages"][1]["content"] == "def add(x): return x + 7"


LAUNCH = "accelerate launch --config_file PRESET.yaml"
WRONG = [
    ("make t5 && make t6", "no target"),
    ("make t5 llama", "no target"),
    ("make test-versions PYTHON_VERSIONS=python3.13", "no target"),
    ("acelerate launch recipes/t5.py", "no program that is known"),
    ("python -m toolkit prove", "invalid choice"),
    ("shardtune begin DIR", "invalid choice"),
    ("pip install 'shardtune[tensorbord]'", "no extra"),
    ("pip install -e '.[benches]'", "no extra"),
    ("pip install 'torchao>=0.17'", "does not ask for torchao>=0.17"),
    (".venv/bin/pip install -c pins.txt torch", "no file pins.txt"),
    ("pip instal torch", "invalid choice"),
    (".venv/bin/python -m pip install -e '.[benches]'", "no extra"),
    ("$ python -m toolkit checkpoints runs/a runs/b", "unrecognized arguments"),
    ("python -m toolkit verify --model llama --adapter.method lora", "no model llama"),
    ("python -m toolkit verify --adapter.methods lora", "did you mean --adapter.method?"),
    ("python -m toolkit compare --presets ddp,fsdp3 -- recipes/t5.py --config RUN.yaml", "preset fsdp3"),
    ("python -m toolkit compare --presets ddp -- recipes/t5.py --config RUN.yaml --optim.lrr 1", "did you mean --optim.lr?"),
    ("accelerate launch --config_file accelerate_configs/gone.yaml recipes/t5.py --config RUN.yaml", "no such accelerate config"),
    ("accelerate launch --config_file accelerate_configs/single.yaml recipes/t5.py --config RUN.yaml", "without --quiet"),
    (f"{LAUNCH} --no_such_flag 1 recipes/t5.py --config RUN.yaml", "2"),  # the launcher's exit code
    (f"{LAUNCH} recipes/t5.py --config recipes/configs/gone.yaml", "gone.yaml cannot be read"),
    (f"{LAUNCH} recipes/llm.py \\\n --config recipes/configs/llm_functions.yaml --train.max_steps 20", "warm up for fewer"),
    ("sbatch docs/launch/pbs.sbatch recipes/t5.py --config RUN.yaml", "pbs.sbatch"),
    ("sbatch --nodes=4 docs/launch/slurm.sbatch recipes/t5.py --config RUN.yaml --optim.lrr 1", "did you mean --optim.lr?"),
    ("srun bash -c 'RANK=$SLURM_PROCID python recipes/t5.py --config RUN.yaml --optim.lrr 1'", "did you mean --optim.lr?"),
]


@pytest.mark.parametrize(("command", "says"), WRONG)
def test_a_wrong_command_is_found(command: str, says: str) -> None:
    with pytest.raises((Exception, SystemExit), match=re.escape(says)):
        for words in list_commands(f"```sh\n{command}\n```"):
            check_command(words)


def test_commands_are_found_in_every_place() -> None:
    page = "`make t5`\n  ```sh\n  make t6\n  ```\n```\noutput, it's no shell\n$ make llm\n```\n"
    page += "| `make test` | `it's no shell` |\n```text\nmake peace\n```\n"
    assert list(list_commands(page)) == [["make", "t6"], ["make", "llm"], ["make", "t5"], ["make", "test"]]


@pytest.mark.parametrize(
    "name", ["toolkit/losses.py", "tests/unit/test_loss.py::test_gone", "test_gone.py", "no_such_function()"]
)
def test_a_wrong_name_is_found(name: str) -> None:
    assert not name_exists(name)


def test_readme_installs_and_runs_within_40_lines_and_maps_every_folder() -> None:
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    commands = list(list_commands("\n".join(lines[:40])))
    assert commands[:2] == [["make", "t5"], ["make", "test"]]
    folders = {path.name for path in (REPOSITORY / "toolkit").iterdir() if (path / "__init__.py").exists()}
    assert {folder for folder in folders if not any(f"`toolkit/{folder}/`" in line for line in lines)} == set()


def list_commands(text: str) -> Iterator[list[str]]:
    """Words of each command in the fenced blocks, and of those of ours in backticks.

    Raises:
        ValueError: a line of a `sh` block begins with no program that is known here.
    """
    for language, block in FENCE.findall(text):
        if language not in ("", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for command in split_commands(line.removeprefix("$ "), is_shell=language == "sh"):
                if is_ours(command):
                    yield command
                elif language == "sh":
                    if command[0] not in SHELL and not command[0].startswith("-"):  # flags of srun
                        raise ValueError(f"no program that is known: {shlex.join(command)}")
                    yield command
    for line in INLINE.findall(FENCE.sub("", text)):
        for command in split_commands(line, is_shell=False):
            is_mention = command[:2] == ["accelerate", "launch"] and not any(word.endswith(".py") for word in command)
            if is_ours(command) and len(command) > 1 and not is_mention:
                yield command


def split_commands(line: str, *, is_shell: bool) -> Iterator[list[str]]:
    """Words of each command of a line, those that `bash -c` runs too, without variables set for them.

    Args:
        is_shell: whether it must be one; other text gives nothing where it cannot be split.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.wordchars += "$…*?[]{}()!,%+@:^"
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        tokens = [*lexer, ";"]
    except ValueError:
        if is_shell:
            raise
        return
    for word in tokens:
        if not re.fullmatch(r"[&|;]+", word):
            words.append(word)
            continue
        while words and (words[0] in ("do", "srun") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
            words.pop(0)
        if "bash" in words and "-c" in words:
            yield from split_commands(words[words.index("-c") + 1], is_shell=is_shell)
        elif words:
            yield words
        words = []


def is_ours(command: list[str]) -> bool:
    programs = ("make", "sbatch", "shardtune", "python", "python3", "pip")
    return command[0].split("/")[-1] in programs or command[:2] == ["accelerate", "launch"]


def check_command(command: list[str]) -> None:
    """Raise whatever the command itself would say before it does anything."""
    words = [fill(word) for word in command]
    if words[0] == "make":
        written = Path("Makefile").read_text()
        targets = " ".join(re.findall(r"^([a-z0-9 -]+):", written, re.MULTILINE)).split()
        variables = re.findall(r"^([A-Z]+) \?=", written, re.MULTILINE)
        unknown = {word for word in words[1:] if word not in targets and word.partition("=")[0] not in variables}
        assert not unknown, f"no target {unknown}"
    elif words[0] == "accelerate":
        check_launch(words[2:])
    elif words[0] == "sbatch":
        script = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
        assert Path(words[script]).exists(), words[script]
        check_recipe(words[script + 1], words[script + 2 :])
    elif words[0].endswith("pip") or words[1:3] == ["-m", "pip"]:
        check_pip(words[1 if words[0].endswith("pip") else 3 :])
    elif words[0] == "shardtune" or words[1:3] == ["-m", "toolkit"]:
        check_toolkit(words[1 if words[0] == "shardtune" else 3 :])
    elif words[1:2] == ["-m"]:
        assert Path(words[2].replace(".", "/")).with_suffix(".py").exists() or words[2] in MODULES, words[2]
    elif words[0].endswith("python"):
        check_recipe(words[1], words[2:])


def check_pip(words: list[str]) -> None:
    """Constraints and extras exist, and bounds are those of pyproject.toml."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = [
        str(Requirement(line)) for line in [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    ]
    options = argparse.ArgumentParser(prog="pip", allow_abbrev=False)
    options.add_argument("command", choices=["install"])
    options.add_argument("-c", type=Path)
    options.add_argument("-e", action="store_true")
    options.add_argument("--extra-index-url")
    options.add_argument("packages", nargs="+", type=lambda word: Requirement(re.sub(r"^\.(?=\[)", project["name"], word)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        arguments = options.parse_args(words)
    assert arguments.c is None or arguments.c.exists(), f"no file {arguments.c}"
    for package in arguments.packages:
        assert package.name != project["name"] or package.extras <= extras.keys(), f"no extra {package.extras}"
        assert not package.specifier or str(package) in bounds, f"pyproject.toml does not ask for {package}"


def fill(word: str) -> str:
    """What a reader or the shell may put into a placeholder; a number where it is one letter or a variable."""
    word = re.sub(r"\$\w+", "2", word)
    for preset in ("PRESET.yaml", "MY.yaml"):
        word = word.replace(preset, "accelerate_configs/fsdp2_multi_node.yaml")
    return re.sub(r"^(N|R)$", "2", word)


def check_launch(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(words)
    if arguments.config_file:
        mapping = check_accelerate_yaml(Path(arguments.config_file))
        # Else the launcher's traceback would be the last that a user sees.
        assert arguments.quiet or mapping["distributed_type"] != "NO", "one process without --quiet"
    if arguments.module and arguments.training_script == "toolkit":
        check_toolkit(arguments.training_script_args)
    else:
        check_recipe(arguments.training_script, arguments.training_script_args)


def check_recipe(script: str, flags: list[str]) -> None:
    name = Path(script).name.replace("RECIPE", "t5")
    assert name in RECIPES and (Path("recipes", name).exists()), script
    if flags == ["--help"]:
        return
    config_class, check = RECIPES[name]
    flags = [flag.replace("RUN.yaml", f"recipes/configs/{EXAMPLES[name]}.yaml") for flag in flags]
    config = load_config(config_class, flags, check=check)
    if hasattr(config, "adapter"):
        check_adapter_config(config)
    if config_class is not MnistConfig:
        check_model(config.model.name_or_path)


def check_toolkit(words: list[str]) -> None:
    arguments, flags = parse_cli(words if len(words) > 1 else [*words, "--help"])  # a mention needs no arguments
    if arguments is None:
        return
    if arguments.job == "compare":
        for preset in arguments.presets:
            if not PLACEHOLDER.fullmatch(preset):
                load_preset(preset)
        script, *recipe_flags = words[words.index("--") + 1 :]
        check_recipe(script, recipe_flags)
    elif arguments.job == "export":
        assert {flag.removeprefix("--").partition("=")[0] for flag in flags if flag.startswith("--")} <= {*MAY_CHANGE}, flags
    elif arguments.job in cli.WITH_RUN_FLAGS:
        check_run_flags(arguments, flags)
    else:
        assert not flags, f"unrecognized arguments: {flags}"
    if arguments.job == "check" and not PLACEHOLDER.search(str(arguments.file)):
        check_accelerate_yaml(arguments.file)


class Parsed(Exception):
    """Ends `main` before it does anything."""


def parse_cli(words: list[str]) -> tuple[Any, list[str]]:
    """What the parser of `python -m toolkit` makes of its arguments; None for its help. `main` parses, and does no more."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = parse(parser, args, namespace, **options)
        finally:
            depth -= 1
        if depth == 0:
            raise Parsed(*result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(sys, "argv", ["toolkit", *words])
        try:
            cli.main()
        except Parsed as parsed:
            return parsed.args[0], parsed.args[1]
        except SystemExit as end:
            assert end.code == 0, words
    return None, []


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(f"{parser.prog}: {message}")


def check_run_flags(arguments: Any, flags: list[str]) -> None:
    """Dotted flags of `plan`, `preview` and `verify`: the recipe's, which the model chooses."""
    given_model = getattr(arguments, "model", None)
    if given_model:
        check_model(given_model)
    named = [name for name in ("llm", "t5") if name in f"{arguments.recipe} {arguments.config} {given_model}"]
    # A placeholder may stand for either.
    recipe = "llm.py" if "llm" in named or (not named and "--data.max_length_tokens" in flags) else "t5.py"
    example = f"recipes/configs/{EXAMPLES[recipe]}.yaml"
    rows = ["--data.source=not/read", "--train.max_steps=1"]
    files = [arguments.config] if isinstance(arguments.config, str) else arguments.config or []
    given = [f"--config={file.replace('RUN.yaml', example)}" for file in files] or rows
    model = f"--model.name_or_path={given_model or f'recipes/models/{EXAMPLES[recipe]}'}"
    config_class, check = RECIPES[recipe]
    check_adapter_config(load_config(config_class, [*given, model, *flags], check=check))
    for preset in getattr(arguments, "presets", None) or []:
        load_preset(preset)
    if getattr(arguments, "accelerate_config", None) and not PLACEHOLDER.search(str(arguments.accelerate_config)):
        check_accelerate_yaml(arguments.accelerate_config)


def check_model(name: str) -> None:
    """Where a model may come from: a placeholder, a folder here, an export of `make t5`, `llm` or `gpu`, or a hub id."""
    if name.startswith("runs/"):
        _, run, kind = name.split("/")
        configs = [yaml.safe_load(Path(file).read_text()) for file in re.findall(r"--config (\S+)", Path("Makefile").read_text())]
        made = {config["run"]["name"]: config.get("export", {}).get("merge", False) for config in configs}
        made |= dict.fromkeys(re.findall(r"--run.name (\S+)", Path("docs/gpu_first_run.md").read_text().replace("`", " ")), False)
        assert run in made and (kind == "export" or (kind == "merged" and made[run])), f"`make` writes no {name}"
    elif not PLACEHOLDER.fullmatch(Path(name).name) and not (Path(name) / "config.json").exists():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", name) and name.split("/")[0] not in FOLDERS, f"no model {name}"


def name_exists(name: str) -> bool:
    """Whether what stands in backticks is there, if it is a path of the repository, a test or a function of the toolkit."""
    path, _, test = name.partition("::")
    if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", path):
        found = list(REPOSITORY.glob(path.rstrip("/")))
        return bool(found) and (not test or f"def {test.partition('[')[0]}(" in found[0].read_text())
    if re.fullmatch(r"test_\w+\.py", path):
        return any((REPOSITORY / "tests").rglob(path))
    if re.fullmatch(r"[\w.]+\(\)", name):
        function = re.compile(rf"^ *(def|class) {name[:-2].split('.')[-1]}\b", re.MULTILINE)
        files = [*(REPOSITORY / "toolkit").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]
        return any(function.search(file.read_text()) for file in files)
    return True


def link_leads_somewhere(link: str, page: Path) -> bool:
    """Relative links alone: to a file, and to a heading of it."""
    if link.startswith(("http:", "https:")):
        return True
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}
