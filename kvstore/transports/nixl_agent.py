"""One agent of NIXL: registered memory, and lists of it that are prepared for transfers.

The package ``nixl`` is optional and loaded here only. Its errors have no common base, so every one of them is a failure
of the transport. After NIXL's Python API (github.com/ai-dynamo/nixl, ``src/api/python/_api.py``).

NIXL's own thread for progress is not used: it never sleeps, and so keeps a core busy. :meth:`NixlAgent.progress` is
called instead, often enough for others to connect; bytes then move without this side where UCX can read remote memory.
"""

import importlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor

from kvstore.transports.transport import TransportFailed

BACKEND = "UCX"


class NixlAgent:
    """Owned by one transport; called on the event loop only."""

    def __init__(self, memory: str) -> None:
        """Start an agent for ``memory``, DRAM or VRAM; raises TransportFailed without the package or its backend."""
        self.memory = memory
        with as_failure("it cannot be started"):
            self._agent = _new_agent()

    def metadata(self) -> bytes:
        """Return what another agent needs to read from this one."""
        with as_failure("it has no metadata"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add_source(self, metadata: bytes) -> str:
        """Return the name of another agent that can be read from now."""
        with as_failure("its agent cannot be connected to"):
            name: str | bytes = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else name

    def remove_source(self, name: str) -> None:
        """Forget another agent, which may be gone."""
        with suppress(TransportFailed), as_failure("its agent cannot be forgotten"):
            self._agent.remove_remote_agent(name)

    def register(self, blocks: Tensor) -> Any:
        """Let NIXL read or write ``blocks``; returns a handle for :meth:`deregister`."""
        with as_failure("memory cannot be registered"):
            return self._agent.register_memory([(*place(blocks), "")], self.memory)

    def deregister(self, registered: Any) -> None:
        """Give memory back."""
        with as_failure("memory cannot be given back"):
            self._agent.deregister_memory(registered)

    def own_blocks(self, blocks: Tensor) -> Any:
        """Return a prepared list of ``blocks [num_blocks, block_bytes]``, registered here."""
        address, _, device = place(blocks)
        return self._prepare("NIXL_INIT_AGENT", address, device, *blocks.shape)

    def source_blocks(self, name: str, address: int, device: int, num_blocks: int, block_bytes: int) -> Any:
        """Return a prepared list of the blocks at ``address`` of another agent, registered there."""
        return self._prepare(name, address, device, num_blocks, block_bytes)

    def begin_read(self, source: Any, source_ids: Sequence[int], own: Any) -> Any:
        """Return a READ of these entries of ``source`` into the first ones of ``own``, ready for :meth:`transfer`."""
        with as_failure("a read cannot begin"):
            own_ids = list(range(len(source_ids)))
            return self._agent.make_prepped_xfer("READ", own, own_ids, source, list(source_ids))

    def transfer(self, request: Any) -> bool:
        """Start a READ and return whether it is done; raises TransportFailed when it fails."""
        with as_failure("a read failed"):
            return _is_done(self._agent.transfer(request))

    def is_done(self, request: Any) -> bool:
        """Return whether a READ that was started is done; raises TransportFailed when it has failed."""
        with as_failure("a read failed"):
            return _is_done(self._agent.check_xfer_state(request))

    def progress(self) -> None:
        """Do what other agents wait for."""
        with suppress(TransportFailed), as_failure("no progress"):  # whoever waits gives up and says so
            self._agent.get_new_notifs()

    def end(self, request: Any) -> None:
        """Let go of a READ; raises TransportFailed while it may still write, and tries to stop it."""
        with as_failure("a read does not end"):
            request.release()

    def _prepare(self, name: str, address: int, device: int, num_blocks: int, block_bytes: int) -> Any:
        descriptors = np.empty((num_blocks, 3), dtype=np.uint64)
        descriptors[:, 0] = np.uint64(address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        descriptors[:, 1], descriptors[:, 2] = block_bytes, device
        with as_failure("blocks cannot be described"):
            return self._agent.prep_xfer_dlist(name, descriptors, self.memory)


def place(blocks: Tensor) -> tuple[int, int, int]:
    """Return the address, the length in bytes and the device of memory, as NIXL counts them."""
    return blocks.data_ptr(), blocks.numel() * blocks.element_size(), blocks.device.index or 0


@contextmanager
def as_failure(what: str) -> Iterator[None]:
    """Raise TransportFailed for whatever NIXL raises inside."""
    try:
        yield
    except TransportFailed:
        raise
    except ImportError as error:
        raise TransportFailed("the package is not installed: pip install 'baton[nixl]'") from error
    except Exception as error:  # the edge to a foreign library
        raise TransportFailed(f"{what}: {error}") from error


def _is_done(state: str) -> bool:
    if state not in ("DONE", "PROC"):
        raise TransportFailed(f"a read ended as {state}")
    return state == "DONE"


def _new_agent() -> Any:
    api = importlib.import_module("nixl._api")
    log = logging.getLogger("nixl")  # which comes with a handler that writes to stdout
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    agent = api.nixl_agent(
        f"baton-{secrets.token_hex(8)}", api.nixl_agent_config(backends=[BACKEND], enable_prog_thread=False)
    )
    if BACKEND not in agent.backends:
        raise TransportFailed(f"its backend {BACKEND} is missing")
    return agent
