"""The peers' virtual environments: made on first use, again when their requirements change.

A peer that cannot be installed is no error: the run goes on without it and says why.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.server import last_line
from compose.console import note

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install")


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment, by name and by the file in ``requirements/`` that lists its packages."""

    name: str
    requirements: str
    options: tuple[str, ...] = ()
    """Of ``pip install``."""


VLLM = Environment("vllm", "peers-vllm.txt", ("--no-deps",))
LLAMA_CPP = Environment("llama_cpp", "peers-llama-cpp.txt")
PLOT = Environment("plot", "peers-plot.txt")


class NotInstalled(Exception):
    """An environment could not be made; says why."""


def python_of(environment: Environment, home: Path) -> Path:
    """Return the environment's Python, and make it first when it is not there; raises NotInstalled."""
    folder = home.absolute() / environment.name
    python = folder / "bin" / "python"
    wanted = (REQUIREMENTS / environment.requirements).read_text()
    stamp = folder / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != wanted:
        note(f"installing {environment.requirements} in {folder} (minutes, once)")
        _install(environment, folder, python)
        stamp.write_text(wanted)
    return python


def _install(environment: Environment, folder: Path, python: Path) -> None:
    log = folder.with_name(f"{environment.name}-install.log")
    venv.create(folder, with_pip=True)
    command = (str(python), *_PIP, *environment.options, "-r", str(REQUIREMENTS / environment.requirements))
    with log.open("wb") as said:
        ended = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=_plain_env(), check=False)
    if ended.returncode != 0:
        raise NotInstalled(f"not installed: {last_line(log)}")


def _plain_env() -> dict[str, str]:
    """Our environment without what would lead another Python to our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def own_python() -> Path:
    """Return the Python that runs us, in which transformers is installed."""
    return Path(sys.executable)
