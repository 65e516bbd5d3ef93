"""Checks of a running cluster, as one of its gateways shows it."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from common.messages import Fingerprint
from compose.finding import Finding, failed, ok, skipped, warning

MAX_TICK_AGE_S = 10.0
_CONNECT_S = 2.0


class CheckedWorker(msgspec.Struct, frozen=True):
    """What is looked at of a worker in ``GET /v1/cluster``."""

    id: str
    role: str
    address: str
    state: str
    connected: bool
    tick_age_s: float
    fingerprint: Fingerprint


class CheckedCluster(msgspec.Struct, frozen=True):
    """What is looked at of the answer."""

    workers: tuple[CheckedWorker, ...]
    redis: str


def check_members(cluster: CheckedCluster) -> Iterator[Finding]:
    """Yield whether the cluster has what it needs, and whether each worker works."""
    if cluster.redis == "up":
        yield ok("gateway's redis", "up")
    else:
        yield failed("gateway's redis", "down: no prompt reaches the prefill workers", "see the gateway's log")
    for role, without in (("decode", "nothing can be served"), ("prefill", "decode workers read all prompts")):
        ready = [worker for worker in cluster.workers if worker.role == role and worker.state == "ready"]
        if ready:
            yield ok(f"{role} workers", f"{len(ready)} ready")
        else:
            verdict = failed if role == "decode" else warning
            yield verdict(f"{role} workers", f"none is ready: {without}", f"start one: baton {role} --help")
    for worker in cluster.workers:
        yield from _check_worker(worker)


def _check_worker(worker: CheckedWorker) -> Iterator[Finding]:
    if not worker.connected and worker.state == "ready":
        yield failed(
            worker.id,
            f"the gateway has no session with it at {worker.address}",
            "make the address reachable from the gateway (--host, --advertise), with one BATON_CLUSTER_TOKEN for all",
        )
    if worker.tick_age_s > MAX_TICK_AGE_S:
        what = f"its step loop has not turned for {worker.tick_age_s:.0f} s"
        yield failed(worker.id, what, f"baton drain {worker.id}, or kill it; its work moves")


def check_fingerprints(workers: Sequence[CheckedWorker]) -> Finding:
    """Say whether all workers can exchange blocks."""
    if not workers:
        return skipped("fingerprints", "there is no worker")
    first = workers[0]
    for other in workers[1:]:
        if field := _difference(first.fingerprint, other.fingerprint):
            return failed(
                "fingerprints",
                f"{first.id} and {other.id} differ in {field}, so they exchange no blocks",
                "start both with the same model files and options (--dtype, --block-size), and the same version",
            )
    return ok("fingerprints", f"{len(workers)} workers can exchange blocks")


def _difference(a: Fingerprint, b: Fingerprint) -> str:
    fields = msgspec.structs.fields(Fingerprint)
    return next((field.name for field in fields if getattr(a, field.name) != getattr(b, field.name)), "")


async def check_ports(workers: Iterable[CheckedWorker]) -> list[Finding]:
    """Say which workers' addresses can be connected to from here."""
    return list(await asyncio.gather(*(_check_port(worker) for worker in workers)))


async def _check_port(worker: CheckedWorker) -> Finding:
    host, _, port = worker.address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError) as error:
        what = f"{worker.address} cannot be connected to from here ({type(error).__name__})"
        return failed(worker.id, what, "open the port between all machines of the cluster, or correct --advertise")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ok(worker.id, f"{worker.address} can be connected to")
