"""The command line of ``baton up``: its own options, and under a heading for each those that its processes take."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import uvloop
from cyclopts import Group, Parameter

from compose.passed_on import PassedOn, passed_on, passed_on_options
from compose.up_config import UpConfig

_OWN = Parameter(name="*")
_GROUPS = {
    name: Group(name, help=f"Passed on to the {name.lower()}.", sort_key=number)
    for number, name in enumerate(("Workers", "Gateway", "Gateway and workers"), start=1)
}


def up_command() -> Callable[..., None]:
    """Return the command."""

    def up(*, config: UpConfig, **values: Any) -> None:
        uvloop.run(_up(config, passed_on(values)))

    named: dict[str, Any] = {"config": (Annotated[UpConfig, _OWN], UpConfig())}
    for option in passed_on_options():
        parameter = Parameter(help=option.help, group=_GROUPS[option.group])
        named[option.name] = (Annotated[option.type, parameter], option.default)
    up.__annotations__ = {name: annotation for name, (annotation, _) in named.items()}
    up.__kwdefaults__ = {"config": UpConfig()}
    up.__doc__ = UpConfig.__doc__
    up.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in named.items()
        ]
    )
    return up


async def _up(config: UpConfig, passed: PassedOn) -> None:
    from compose.up import up

    await up(config, passed)
