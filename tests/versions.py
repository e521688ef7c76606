"""The unit tests and the invariants of two ranks at both ends of the version ranges, and on each Python. `make test-versions`.

An environment each for the lowest versions that pyproject.toml allows, the newest that the index serves, and the pinned ones of
constraints.txt on the other Pythons. uv reads its own settings: UV_TORCH_BACKEND=cpu takes the CPU build of torch.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

UV = [sys.executable, "-m", "uv"]
LOWEST, NEWEST, PINNED = "lowest", "newest", "constraints.txt"
TESTS = [["-n", "2", "--dist", "loadfile", "--max-worker-restart", "0", "tests/unit"]]
TESTS += [["tests/distributed/test_invariants.py"]]
FIND = "import platform, sys; print(sys.executable, platform.python_version())"
SHOWN = ("torch", "transformers", "accelerate", "datasets", "peft", "numpy")


def main(interpreters: list[str]) -> None:
    """Test with the first Python at both ends, and with the others as pinned; end with 1 unless all ran and passed."""
    first, *others = interpreters
    rows = [run_tests(first, LOWEST), run_tests(first, NEWEST), *(run_tests(name, PINNED) for name in others)]
    print("", "| Python | versions | " + " | ".join(SHOWN) + " | |", "|---" * (len(SHOWN) + 3) + "|", sep="\n")
    print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    raise SystemExit(0 if all(row[-1] == "passed" for row in rows) else 1)


def run_tests(interpreter: str, versions: str) -> list[str]:
    nothing = [interpreter, versions, *("" for _ in SHOWN)]
    try:
        base, python_version = subprocess.check_output([interpreter, "-c", FIND], text=True, stderr=subprocess.DEVNULL).split()
    except (OSError, subprocess.CalledProcessError):
        return [*nothing, f"NOT RUN: {interpreter} cannot be started; name others by make test-versions PYTHONS='...'"]
    with tempfile.TemporaryDirectory() as folder:
        print(f"\nPython {python_version}, {versions}", flush=True)
        python = str(Path(folder, "bin", "python"))
        try:
            subprocess.run([*UV, "venv", "--quiet", "--allow-existing", "--python", base, folder], check=True)
            pins = Path(PINNED) if versions == PINNED else resolve(python, versions, Path(folder, "pins.txt"))
            subprocess.run([*UV, "pip", "install", "--quiet", "--python", python, "-c", str(pins), "-e", ".[test]"], check=True)
        except subprocess.CalledProcessError:
            return [*nothing, "NOT RUN: the environment could not be installed"]
        frozen = subprocess.check_output([*UV, "pip", "freeze", "--quiet", "--python", python], text=True)
        installed = dict(line.split("==") for line in frozen.splitlines() if "==" in line)
        failed = [tests[-1] for tests in TESTS if subprocess.run([python, "-m", "pytest", *tests]).returncode]
    wrong = [f"failed: {', '.join(failed)}"] if failed else []
    if versions == LOWEST:
        wrong += [f"too low: {bound}" for bound in low_bounds(installed)]
    return [python_version, versions, *(installed[name] for name in SHOWN), "; ".join(wrong) or "passed"]


def resolve(python: str, versions: str, pins: Path) -> Path:
    """Write the lowest or newest versions that go together. Test tools, and what the toolkit does not name, are the newest."""
    how = "lowest-direct" if versions == LOWEST else "highest"
    extras = [word for name in ("fp8", "mnist", "tensorboard") for word in ("--extra", name)]
    command = [*UV, "pip", "compile", "--quiet", "--resolution", how, "--python", python, *extras, "--output-file", str(pins)]
    subprocess.run([*command, "pyproject.toml"], check=True, stdout=subprocess.DEVNULL)
    return pins


def low_bounds(installed: dict[str, str]) -> list[str]:
    """Dependencies of the toolkit whose lower bound cannot be installed beside the other lower bounds, with what was instead."""
    wrong, dependencies = [], tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    for dependency in map(Requirement, dependencies):
        (bound,) = (Version(part.version) for part in dependency.specifier if part.operator == ">=")
        version = Version(installed[dependency.name.replace("_", "-").lower()])
        if Version(version.public) != bound:
            wrong.append(f"{dependency} took {version}")
    return wrong


if __name__ == "__main__":
    main(sys.argv[1:] or ["python3.11", "python3.12", "python3.13"])
