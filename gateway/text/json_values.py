"""JSON values that clients send and Baton only passes on: how deep they are, and their texts."""

from collections.abc import Callable
from typing import Any


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested in ``value`` more than ``limit`` deep."""
    level = [value]
    for _ in range(limit):
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with every text in it changed, keys included. For values whose depth was checked."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): map_strings(item, change) for key, item in value.items()}
        case list() | tuple():
            return [map_strings(item, change) for item in value]
        case _:
            return value


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
