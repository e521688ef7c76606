"""Packs this project's pinned environment for a machine without a network: another Python, a GPU, and an image's CUDA libraries.

    python -m benchmarks.gpu.pack --python 3.12 --part-mib 60 --output FOLDER

FOLDER then has `environment.tar.xz.000`, … of at most that size, their sums, and `unpack.sh`, which makes an environment there:

    sh FOLDER/unpack.sh /scratch/env && /scratch/env/bin/python -m benchmarks.gpu

The environment is a venv of that machine's own Python whose only packages are the packed ones: what its image has installed for
another torch (torchvision, torchaudio) cannot be imported. NVIDIA's libraries are linked from the image, except NCCL.
"""

import argparse
import email
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from benchmarks.measuring import REPOSITORY

PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 29)))
WITH_TORCH = ("triton", "nvidia-nccl", "setuptools")
"""What torch's wheel asks for that is packed as it says: NCCL of an image may lack symbols."""
EXTRAS = ("test", "fp8", "bench")
"""Of `pyproject.toml`."""
WITHOUT_WHEEL = ("rouge-score",)
"""Pure Python, built here."""
UNPACK = r"""set -eu
here=$(cd "$(dirname "$0")" && pwd); env=${1:?usage: sh unpack.sh FOLDER [PYTHON]}; python=${2:-pythonVERSION}
(cd "$here" && sha256sum --quiet -c SHA256SUMS)
"$python" -m venv --without-pip "$env"
env=$(cd "$env" && pwd); site=$("$env/bin/python" -c 'import site; print(site.getsitepackages()[0])')
cat "$here"/environment.tar.xz.[0-9]* | tar -xJ -C "$env" && mv "$env"/packed/* "$site"
printf '#!/bin/sh\nshift\nexec "%s/bin/python" -m accelerate.commands.launch "$@"\n' "$env" >"$env/bin/accelerate"  # launch
chmod +x "$env/bin/accelerate"
if [ -d "$site/torch/lib" ]; then  # the image's CUDA libraries, beside torch's own, where these look
  for name in cudart cudnn cublas cufft curand cusolver cusparse cupti nvrtc nvJitLink cufile nvshmem nvToolsExt; do
    find / -xdev -name "lib${name}*.so*" -not -path "$env/*" 2>/dev/null |
      while read -r file; do [ -e "$site/torch/lib/${file##*/}" ] || ln -s "$file" "$site/torch/lib/"; done
  done
  "$env/bin/python" -c 'import torch; print("torch", torch.__version__, "sees a GPU:", torch.cuda.is_available())'
fi
echo "unpacked: $env/bin/python"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--part-mib", type=int, default=60, help="most MiB of a file")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--index-url", help="where torch comes from: PyPI's is for the newest CUDA")
    parser.add_argument("--only", nargs="+", metavar="PACKAGE", help="these packages, without torch")
    options = parser.parse_args()
    options.output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="pack-") as folder:
        site, names = Path(folder) / "packed", options.only or needed_packages()
        if not options.only:
            install([f"torch=={find_version('torch')}"], site, options.python, options.index_url)
            install(required_by_torch(site), site, options.python, options.index_url)
        install([f"{name}=={find_version(name)}" for name in names if name not in WITHOUT_WHEEL], site, options.python)
        install([f"{name}=={find_version(name)}" for name in names if name in WITHOUT_WHEEL], site)
        save_parts(site, options.output, options.part_mib * 2**20)
    (options.output / "unpack.sh").write_text(UNPACK.replace("pythonVERSION", f"python{options.python}"))


def find_version(name: str) -> str:
    """As `constraints.txt` pins it, or as it is installed here."""
    pinned = re.search(rf"^{name.replace('-', '[-_.]')}==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.M | re.I)
    return pinned[1] if pinned else version(name)


def needed_packages() -> list[str]:
    """What the project and `EXTRAS` need, found through the packages that are installed here. Without torch."""
    from packaging.requirements import Requirement

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    waiting, found = (
        [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])],
        set(),
    )
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or name == project["name"] or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += requires(name) or []
            found.add(name)
        except PackageNotFoundError:
            print(f"left out: {name} is not installed here", flush=True)
    return sorted(found - {"torch", *WITH_TORCH})


def required_by_torch(site: Path) -> list[str]:
    """The requirements `WITH_TORCH` as torch's wheel has them."""
    metadata = email.message_from_string(next(site.glob("torch-*.dist-info/METADATA")).read_text())
    lines = [line.partition(";")[0].strip() for line in metadata.get_all("Requires-Dist", [])]
    return [line for line in lines if line.startswith(WITH_TORCH)]


def install(requirements: list[str], site: Path, python: str | None = None, index_url: str | None = None) -> None:
    """Put packages without their dependencies into `site`: wheels for that Python on Linux, or None: built here."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(site)]
    if python:
        command += ["--only-binary=:all:", "--python-version", python, *(f"--platform={name}" for name in PLATFORMS)]
    command += [*(["--index-url", index_url] if index_url else []), *requirements]
    if requirements:
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)


def save_parts(site: Path, output: Path, part_bytes: int) -> None:
    """Write `site` as parts of an archive, and their sums."""
    sums, archive = list[str](), site.parent / "environment.tar.xz"
    shutil.rmtree(site / "bin", ignore_errors=True)  # scripts that name this machine's Python
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        tar.add(site, arcname=site.name)
    with archive.open("rb") as file:
        while part := file.read(part_bytes):
            sums.append(f"{hashlib.sha256(part).hexdigest()}  {archive.name}.{len(sums):03d}\n")
            (output / sums[-1].split()[1]).write_bytes(part)
    (output / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(sums)} parts, {archive.stat().st_size / 2**20:.0f} MiB, in {output}")


if __name__ == "__main__":
    main()
