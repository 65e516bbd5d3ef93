"""From what ``--model`` says to a folder on this machine: a name we prepare, a folder, or a model of the hub."""

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from common.errors import ConfigError, Unavailable
from compose import smollm2
from compose.console import note

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve_model(source: str) -> Path:
    """Return the folder of the model that ``source`` names, fetched if need be.

    Raises ConfigError when there is no such model, Unavailable when it cannot be fetched now.
    """
    if source == smollm2.NAME:
        return smollm2.prepare()
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _checked(folder.absolute(), source)
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(f"--model {source}: no such folder, and a model of the hub is named OWNER/NAME")
    return _checked(_from_hub(source), source)


def _checked(folder: Path, source: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {source}: there is no config.json in {folder}")
    return folder


def _from_hub(name: str) -> Path:
    note(f"looking for {name} on the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise ConfigError(f"--model {name}: the hub asks for a login that may read this model (HF_TOKEN)") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"--model {name}: no such folder, and the hub has no such model") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise Unavailable(
            f"--model {name}: no such folder, and the hub cannot be reached ({type(error).__name__}); "
            f"give a folder, or {smollm2.NAME}"
        ) from error


def link_to(folder: Path, link: Path) -> None:
    """Let the symbolic link ``link`` lead to ``folder``; at any moment it leads to the old one or the new.

    Raises ConfigError when it cannot be made.
    """
    part = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        part.symlink_to(os.path.relpath(folder, link.parent))
        part.replace(link)
    except OSError as error:
        raise ConfigError(f"--link {link} cannot be made: {error.strerror}") from error
