"""Pages hold: commands parse as typed, and the files, functions, tests and links that they name exist.

README's commands also run, in `tests/recipes/test_readme.py`.
"""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import dropwhile, groupby
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from mnist_config import MnistConfig, check_mnist_config

from tests.support.launch import REPOSITORY
from toolkit.config.load import load_config
from toolkit.config.python import CONFIGS
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.models.lora import check_adapter_config
from toolkit.tools import main as cli
from toolkit.tools.compare.runs import load_preset
from toolkit.tools.export import may_change

PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "benchmarks/README.md", "accelerate_configs/README.md"]
PAGES += ["toolkit/config/migrating.md", "tests/planting/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"(?<![a-z0-9_])[A-Z][A-Z0-9_]*(?![a-z0-9_])")  # FOLDER, RUN.yaml, /shared/MODEL, N
FOLDERS = ("toolkit", "tests", "recipes", "benchmarks", "docs", "accelerate_configs")
MODULES = ("pytest", "venv", "pip", "build", "twine")  # of others, for `python -m`
PROGRAMS = ("make", "sbatch", "shardtune", "python", "python3")
SHELL = {"git", "cd", "source", "export", "head", "hf", "pip", ".venv/bin/pip", "wait", "trap", "launcher=$!"}  # or flags of srun
EXAMPLES = {"t5": "t5_functions", "llm": "llm_stdlib", "dpo": "dpo", "dpo_t5": "dpo_t5", "mnist": "mnist_digits"}  # RUN.yaml


@pytest.fixture(autouse=True)
def _at_the_repository(monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse_and_what_is_named_exists(page):
    text = Path(page).read_text()
    for command in list_commands(text):
        try:
            check_command(command)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: {shlex.join(command)}\n{error}")
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    missing = [names for names in re.findall(r"(?:shardtune|'\.)\[([\w,-]+)\]", text) if not {*names.split(",")} <= extras.keys()]
    missing += [name for name in INLINE.findall(FENCE.sub("", text)) if not name_exists(name)]
    assert not missing + [link for link in LINK.findall(text) if not link_leads_somewhere(link, Path(page))]
    if page.startswith("docs/"):  # it says what it is for, and has a place in the site
        assert re.match(r"# .*\n\n(Read|Use|Look)\b", text)
        assert f'"{page.removesuffix(".md")}"' in Path("docs/conf.py").read_text()


def test_readme_is_short_and_maps_every_folder():
    text = Path("README.md").read_text()
    folders = {path.parent.name for path in Path("toolkit").glob("*/__init__.py")}
    assert len(text.split()) <= 1800 and {folder for folder in folders if f"`toolkit/{folder}/`" not in text} == set()


def list_commands(text: str) -> Iterator[list[str]]:
    """Words of each command in the fenced blocks, and of those of ours in backticks. ValueError: no such program is known."""
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "sh") else []:
            if line.split(" ")[0] not in ("for", "echo"):
                for command in split_commands(line.removeprefix("$ ")):
                    if language == "sh" and not is_ours(command) and command[0] not in SHELL and command[0][0] != "-":
                        raise ValueError(f"no program that is known: {shlex.join(command)}")
                    if is_ours(command):
                        yield command
    for line in INLINE.findall(FENCE.sub("", text)):
        for command in split_commands(line):
            is_mention = command[:2] == ["accelerate", "launch"] and not any(word.endswith(".py") for word in command)
            if is_ours(command) and len(command) > 1 and not is_mention:
                yield command


def split_commands(line: str) -> Iterator[list[str]]:
    """Words of each command of a line, those that `bash -c` runs too, without variables set for them."""
    with suppress(ValueError):  # a text with an apostrophe
        for is_end, group in groupby(shlex.split(line, comments=True), lambda word: word in ("&&", "|", ";", "&")):
            words = [*dropwhile(lambda word: word == "srun" or re.fullmatch(r"[A-Z_]+=.*", word), group)]
            if "bash" in words and "-c" in words[:-1]:
                yield from split_commands(words[words.index("-c") + 1])
            elif words and not is_end:
                yield words


def is_ours(command: list[str]) -> bool:
    return command[0].split("/")[-1] in PROGRAMS or command[:2] == ["accelerate", "launch"]


def check_command(command: list[str]) -> None:
    """Raise whatever the command itself would say before it does anything. A placeholder is filled in as a reader might."""
    words = [re.sub(r"^(N|R)$", "2", re.sub(r"\$\w+", "2", word)) for word in command]
    words = [re.sub(r"PRESET\.yaml|MY\.yaml", "accelerate_configs/fsdp2_multi_node.yaml", word) for word in words]
    if words[0] == "make":
        written = Path("Makefile").read_text()
        known = {*" ".join(re.findall(r"^([a-z0-9 -]+):", written, re.MULTILINE)).split()}
        known |= {*re.findall(r"^([A-Z]+) \?=", written, re.MULTILINE)}
        assert {word.partition("=")[0] for word in words[1:]} <= known, f"no target among {words}"
    elif words[0] == "accelerate":
        check_launch(words[2:])
    elif words[0] == "sbatch":
        script = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
        assert Path(words[script]).exists(), words[script]
        check_recipe(words[script + 1], words[script + 2 :])
    elif words[0] == "shardtune" or words[1:3] == ["-m", "toolkit"]:
        check_toolkit(words[1 if words[0] == "shardtune" else 3 :])
    elif words[1:2] == ["-m"]:
        module = Path(words[2].replace(".", "/"))
        assert any(path.exists() for path in (module.with_suffix(".py"), module / "__main__.py")) or words[2] in MODULES, words[2]
    elif words[0].endswith("python"):
        check_recipe(words[1], words[2:])


def check_launch(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(words)
    if arguments.config_file:
        mapping = check_accelerate_yaml(Path(arguments.config_file))
        assert arguments.quiet or mapping["distributed_type"] != "NO", "one process without --quiet"
    if arguments.module and arguments.training_script == "toolkit":
        check_toolkit(arguments.training_script_args)
    elif arguments.training_script != "my_run.py":  # which `tests/recipes/test_readme.py` runs
        check_recipe(arguments.training_script, arguments.training_script_args)


def check_recipe(script: str, flags: list[str]) -> None:
    name = Path(script).stem.replace("RECIPE", "t5")
    assert name in EXAMPLES and Path("recipes", f"{name}.py").exists(), script
    if flags == ["--help"]:
        return
    flags = [flag.replace("RUN.yaml", f"recipes/configs/{EXAMPLES[name]}.yaml") for flag in flags]
    if name == "mnist":
        load_config(MnistConfig, flags, check=check_mnist_config)
        return
    config = load_config(CONFIGS[name], flags)
    check_adapter_config(config)
    check_model(config.model.name_or_path)


def check_toolkit(words: list[str]) -> None:
    job = words[0] if words else "--help"
    if len(words) < 2 or words[1:] == ["--help"]:
        with pytest.raises(SystemExit, match="0"):  # a mention
            cli.build_parser().parse_args([job, "--help"])
        return
    module = Mock()  # records what `main` would call the command's function with
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(cli, "import_module", lambda _: module)
        patch.setattr(sys, "argv", ["toolkit", *words])
        cli.main()
    ((_, flags, options),) = module.method_calls
    flags = flags[0] if flags else []
    for preset in options.get("presets") or []:
        if not PLACEHOLDER.fullmatch(preset):
            load_preset(preset)
    file = options.get("accelerate_config") or (job == "check" and options["file"])
    if file and not PLACEHOLDER.search(str(file)):
        check_accelerate_yaml(file)
    if job == "compare":
        check_recipe(flags[0], flags[1:])
    elif job == "export":
        assert {flag.removeprefix("--").partition("=")[0] for flag in flags if flag.startswith("--")} <= {*may_change()}, flags
    elif job in cli.WITH_RUN_FLAGS:
        check_run_flags(flags, options)


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(f"{parser.prog}: {message}")


def check_run_flags(flags: list[str], options: dict) -> None:
    """Dotted flags of `plan`, `preview`, `train` and `verify`: the recipe's, which the model chooses."""
    model, files = options.get("model"), options["config"]
    check_model(model or "MODEL")
    named = [name for name in ("llm", "t5") if name in f"{options['recipe']} {files} {model}"]
    recipe = "llm" if "llm" in named or (not named and "--data.max_length_tokens" in flags) else "t5"
    example = f"recipes/configs/{EXAMPLES[recipe]}.yaml"
    given = [f"--config={file.replace('RUN.yaml', example)}" for file in ([files] if isinstance(files, str) else files or [])]
    given = given or ["--data.source=not/read", "--train.max_steps=1"]
    named_model = f"--model.name_or_path={model or f'recipes/models/{EXAMPLES[recipe]}'}"
    check_adapter_config(load_config(CONFIGS[recipe], [*given, named_model, *flags]))


def check_model(name: str) -> None:
    """Where a model may come from: a placeholder, a folder here, what a run has written, or a hub id."""
    is_written = re.fullmatch(r"runs/\w+/(export|merged)", name)
    if not is_written and not PLACEHOLDER.fullmatch(Path(name).name) and not (Path(name) / "config.json").exists():
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
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    if link.startswith(("http:", "https:")) or not target.exists() or not heading:
        return link.startswith("http") or target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}


def test_the_job_of_kubeflow_trainer_is_of_its_schema_and_its_command_is_what_a_recipe_takes():
    written = yaml.safe_load(Path("docs/launch/trainjob.yaml").read_text())
    job = TrainerV1alpha1TrainJob.from_dict(written)
    assert job.to_dict() == written, "a key that the schema does not have is dropped"
    trainer = written["spec"]["trainer"]
    (variable,) = trainer["env"]
    assert variable["name"] == "TOOLKIT_ACCELERATE_YAML"
    preset = yaml.safe_load(Path(variable["value"]).read_text())
    gpus = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert (preset["num_machines"], preset["num_processes"]) == (trainer["numNodes"], trainer["numNodes"] * gpus)
    check_command(["accelerate", "launch", "--config_file", variable["value"], *trainer["args"]])
