"""How the compiled CPU kernels are compiled: by numba, once a machine, without the interpreter's lock.

Compiled code is kept beside the source, or in the user's cache directory when that cannot be written, or nowhere when
neither can. Floating-point operations may be reordered and fused and count on finite numbers; a NaN that comes in
comes out somewhere, but nothing may be decided by it.
"""

import logging
from collections.abc import Callable
from typing import Any

import numba

log = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Any:
    """Return ``function`` compiled on its first call for each set of argument types."""
    options: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError as error:  # numba found no directory to write to
        log.warning("compiled kernels are not kept: %s", error)
        return numba.njit(function, **options)
