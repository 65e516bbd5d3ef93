"""The compiled library as Python sees it: the structures of ``baton_cpu.h`` and the functions of ``dispatch.c``.

Calls release the interpreter's lock. Pointers are taken from tensors; whoever fills a structure keeps them alive.
"""

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.native.build import LIBRARY

log = logging.getLogger(__name__)

_ABI = 6
"""BATON_ABI of the header that these declarations follow."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What the library computes with, and how it calls it."""


class Linear(ctypes.Structure):
    """BatonLinear"""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)]


class Cache(ctypes.Structure):
    """BatonCache"""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("k_dim", c_int64),
        ("v_dim", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("dtype", c_int64),
    ]


class Chunk(ctypes.Structure):
    """BatonChunk"""

    _fields_ = [("begin", c_int64), ("num_queries", c_int64), ("position", c_int64), ("table", c_void_p)]


class Rows(ctypes.Structure):
    """BatonRows"""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_chunks", c_int64),
        ("chunks", POINTER(Chunk)),
        ("num_rows", c_int64),
        ("row_ids", c_void_p),
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
    ]


class Form(ctypes.Structure):
    """BatonForm"""

    _fields_ = [
        ("scaling", c_double),
        ("softcap", c_double),
        ("window", c_int64),
        ("chunk", c_int64),
        ("sinks", c_void_p),
    ]


class Layer(ctypes.Structure):
    """BatonLayer"""

    _fields_ = [
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("form", Form),
        ("epsilon", c_double),
        ("head_dim", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("dtype", c_int64),
        ("rotary", c_int64),
    ]


_INT = c_int64
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "baton_linear": (POINTER(Linear), _INT, c_void_p, _INT, c_void_p, _INT),
    "baton_norm": (c_void_p, c_void_p, c_void_p, _INT, _INT, c_double, _INT),
    "baton_silu_mul": (c_void_p, c_void_p, _INT, c_void_p, _INT, _INT, _INT),
    "baton_rotate": (c_void_p, _INT, _INT, _INT, c_void_p, c_void_p, _INT, _INT, _INT),
    "baton_attend": (POINTER(Cache), POINTER(Rows), POINTER(Form), c_void_p, _INT, _INT, c_void_p, _INT),
    "baton_attend_chunk": (POINTER(Cache), POINTER(Form), c_void_p, c_void_p, _INT, c_void_p, _INT, _INT),
    "baton_layers": (POINTER(Layer), POINTER(Cache), _INT, POINTER(Rows), *[c_void_p] * 3, _INT),
    "baton_layer_kv": (POINTER(Layer), POINTER(Cache), POINTER(Rows), *[c_void_p] * 3, _INT),
}
"""Arguments after the context; each returns 0, or -1 when memory is short."""


@lru_cache(maxsize=1)
def load_library(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """Return the library at the highest level that the processor has, or None, with one line in the log, without it."""
    try:
        library = ctypes.CDLL(str(path))
        library.baton_abi.restype = c_int64
        abi = int(library.baton_abi())
    except (OSError, AttributeError) as error:
        log.warning("no compiled CPU kernels, so steps are slower; install again with a C compiler (%s)", error)
        return None
    if abi != _ABI:
        log.warning(
            "the compiled kernels are of another version (%d, not %d) and stay unused; install again", abi, _ABI
        )
        return None
    _declare(library)
    log.info("compiled kernels: %s", choose_level(library))
    return library


def choose_level(library: ctypes.CDLL, name: str | None = None) -> str | None:
    """Switch to the level ``name``, or the highest; return its name, or None when the processor does not have it."""
    chosen: bytes | None = library.baton_choose_level(name.encode() if name else None)
    return chosen.decode() if chosen else None


def _declare(library: ctypes.CDLL) -> None:
    library.baton_choose_level.argtypes, library.baton_choose_level.restype = [c_char_p], c_char_p
    library.baton_context_new.argtypes, library.baton_context_new.restype = [c_int64], c_void_p
    library.baton_has_tile_products.argtypes, library.baton_has_tile_products.restype = [], c_int
    library.baton_race.argtypes, library.baton_race.restype = [c_void_p, c_void_p, c_int64, c_uint64], c_int64
    library.baton_context_free.argtypes, library.baton_context_free.restype = [c_void_p], None
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [c_void_p, *arguments], c_int
