"""Command lines from configuration dataclasses, the single source of every option's name, default and help.

A field ``kv_blocks`` is the flag ``--kv-blocks`` and the variable ``BATON_KV_BLOCKS``; its attribute docstring is the
help. ``BATON_KV_BLOCKS_FILE`` names a file that holds the value, for secrets. A flag goes over the environment, the
environment over the default. What is wrong is said in one line that
names the flag or the variable, with exit status 2. Knows no particular option.
"""

import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import uvloop
from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Env
from rich.console import Console

from common.errors import BatonError, ConfigError, UnsupportedModel

ENV_PREFIX = "BATON_"
_FILE = "_FILE"

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
"""Starting again with the same options cannot help."""

Config = TypeVar("Config")


def application(name: str | None = None, description: str | None = None) -> App:
    """Return an empty command line that reads ``BATON_…`` variables; without ``name`` it is the program's own."""
    return App(
        name=name,
        help=description,
        help_format="plaintext",
        version=lambda: version("baton"),
        config=[_read_files, Env(ENV_PREFIX, command=False)],
        error_console=Console(stderr=True, soft_wrap=True),
        error_formatter=lambda error: f"error: {_message(error)}",
    )


def command(config_type: type[Config], main: Callable[[Config], Awaitable[None]]) -> Callable[..., None]:
    """Return a command whose options are the fields of ``config_type`` and that runs ``main`` on uvloop."""

    def start(*, config: Any) -> None:
        uvloop.run(_await(main(config)))

    start.__annotations__["config"] = Annotated[config_type, Parameter(name="*")]
    start.__doc__ = (config_type.__doc__ or "").strip()
    if not any(_is_required(field) for field in dataclasses.fields(config_type)):  # type: ignore[arg-type]
        start.__kwdefaults__ = {"config": config_type()}
    return start


def run(config_type: type[Config], main: Callable[[Config], Awaitable[None]]) -> NoReturn:
    """Parse this process's command line into ``config_type``, run ``main`` on it and exit."""
    app = application()
    app.default(command(config_type, main))
    execute(app)


def execute(app: App, argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``app`` and exit: 0 when done, 2 for options that cannot work, 1 for every other error of ours."""
    try:
        app(argv)
    except (ConfigError, UnsupportedModel) as error:
        _fail(error, EXIT_BAD_CONFIG)
    except BatonError as error:
        _fail(error, EXIT_FAILED)
    sys.exit(0)


def flag(field: str) -> str:
    """Return the flag of a configuration field."""
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    """Return the environment variable of a configuration field."""
    return ENV_PREFIX + field.upper()


def to_argv(config: Any, *, secret: frozenset[str] = frozenset()) -> list[str]:
    """Return the flags that rebuild the dataclass ``config``, without fields that are at their default or secret."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in secret or value == field.default or value is None:
            continue
        argv += _flags(field.name, value)
    return argv


def to_env(config: Any, fields: frozenset[str]) -> dict[str, str]:
    """Return the variables that give those of ``fields`` that the dataclass ``config`` has and that are not empty."""
    values = {name: getattr(config, name) for name in sorted(fields) if getattr(config, name, None)}
    return {variable(name): value if isinstance(value, str) else " ".join(value) for name, value in values.items()}


def without_options(environ: Mapping[str, str], fields: Iterable[str]) -> dict[str, str]:
    """Return ``environ`` without the variables of ``fields``: they spoke to this process, not to its children."""
    consumed = {variable(field) + ending for field in fields for ending in ("", _FILE)}
    return {name: value for name, value in environ.items() if name not in consumed}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _flags(field: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(field) if value else "--no-" + field.replace("_", "-")]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in (flag(field), str(item))]
    return [flag(field), str(value)]


def _read_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give options without a flag what is in the file that their ``…_FILE`` variable names."""
    names = {argument.name for argument in arguments}
    for argument in arguments:
        if not argument.tokens and argument.name + "-file" not in names:
            _read_file(argument)


def _read_file(argument: Argument) -> None:
    name = variable(argument.name.removeprefix("--").replace("-", "_")) + _FILE
    if not (path := os.environ.get(name)):
        return
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error
    argument.append(Token(keyword=name, value=value, source="env"))


def _message(error: CycloptsError) -> str:
    return " ".join(str(error).split())


def _fail(error: BatonError, status: int) -> NoReturn:
    sys.stderr.write(f"error: {error.message}\n")
    sys.exit(status)


async def _await(work: Awaitable[None]) -> None:
    await work
