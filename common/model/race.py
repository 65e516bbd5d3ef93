"""Which of some weighted tokens is drawn: the first in an exponential race.

Each token has an arrival time, exponentially distributed with mean 1 and divided by its weight; the first to arrive
wins, and token i does so with probability ``weight[i] / sum(weights)`` (the Gumbel-max trick: Gumbel 1954; Maddison,
Tarlow, Minka, A* Sampling, 2014). The times come from a counter-based generator, splitmix64 (Steele, Lea, Flood, Fast
Splittable Pseudorandom Number Generators, 2014), at the place that the token's id says.

So a token's number is its own. Where weights are rounded in another way, as after a prefix was read instead of
computed, another token wins only if two were as close as the rounding. A walk along the running sum of all weights, to
one uniform number, takes a neighbour far more often: a change of one likely token moves the bounds of all behind it.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.native.library import load_library

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def race(weights: Floats, ids: Ids | None, key: int) -> int:
    """Return the index of the token that wins; of equals the first.

    ``weights [K]`` are at least 0, one of them more; ``ids [K]`` are the tokens, None: 0 to K - 1. ``key`` has 64 bits.
    """
    library = load_library()
    if library is None:
        return race_in_numpy(weights, ids, key)
    weights = np.ascontiguousarray(weights)
    address = None if ids is None else np.ascontiguousarray(ids).ctypes.data
    return int(library.baton_race(weights.ctypes.data, address, len(weights), key))


def race_in_numpy(weights: Floats, ids: Ids | None, key: int) -> int:
    """Return what :func:`race` does, without the compiled library."""
    times = arrival_times(np.arange(len(weights)) if ids is None else ids, key)
    return int((weights / times).argmax())


def arrival_times(ids: Ids, key: int) -> Floats:
    """Return ``[K]`` exponentially distributed numbers with mean 1, one for each of ``ids [K]``."""
    words = np.uint64(key) + (ids.astype(np.uint64) + np.uint64(1)) * _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    words ^= words >> np.uint64(31)
    return -np.log(((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52)
