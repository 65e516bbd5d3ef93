"""``baton doctor``: looks at a cluster and its surroundings, and says for whatever is wrong what to do about it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import version

import httpx2
import msgspec

from common.errors import Unavailable
from compose.cluster_checks import CheckedCluster, check_fingerprints, check_members, check_ports
from compose.console import result
from compose.finding import Finding, Verdict, failed, ok, warning
from compose.machine_checks import check_model, check_open_files
from compose.readiness import error_message
from compose.redis_checks import check_redis
from compose.transfer_check import check_transfer


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """Check Redis, workers, ports, clocks, model files and a test transfer; exit with 1 when something is wrong."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    redis: str = ""
    """URL of the cluster's Redis; empty: it is not looked at."""

    model: str = ""
    """Folder of the model's files on this machine; empty: they are not looked at."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    transfer: bool = True
    """Whether to send a test prompt through the cluster."""


async def doctor(config: DoctorConfig) -> None:
    """Print every finding as it is found; raises Unavailable when one has failed."""
    num_failed = 0
    async for finding in _look(config):
        result(finding.lines())
        num_failed += finding.verdict is Verdict.FAILED
    if num_failed:
        raise Unavailable(f"{num_failed} of the checks failed")


async def _look(config: DoctorConfig) -> AsyncIterator[Finding]:
    yield check_open_files()
    for finding in check_model(config.model):
        yield finding
    async for finding in check_redis(config.redis):
        yield finding
    headers = {"Authorization": f"Bearer {config.api_key.split()[0]}"} if config.api_key.strip() else {}
    async with httpx2.AsyncClient(base_url=config.url, headers=headers, trust_env=False, timeout=10.0) as client:
        try:
            async for finding in _look_at_cluster(client, transfer=config.transfer):
                yield finding
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            yield failed("gateway", f"does not answer at {config.url} ({error})", "start one, or name it with --url")
        except msgspec.DecodeError as error:
            yield failed("gateway", f"what answers at {config.url} is none of this version ({error})", "upgrade it")


async def _look_at_cluster(client: httpx2.AsyncClient, *, transfer: bool) -> AsyncIterator[Finding]:
    yield _check_version(str((await client.get("/version")).json()["version"]))
    answer = await client.get("/v1/cluster")
    if answer.status_code != 200:
        yield failed("gateway", f"does not show its cluster: {error_message(answer)}", "give its key with --api-key")
        return
    cluster = msgspec.json.decode(answer.content, type=CheckedCluster)
    for finding in check_members(cluster):
        yield finding
    for finding in await check_ports(cluster.workers):
        yield finding
    yield check_fingerprints(cluster.workers)
    if transfer:
        yield await check_transfer(client)


def _check_version(theirs: str) -> Finding:
    if theirs == version("baton"):
        return ok("gateway", f"answers, version {theirs}")
    return warning("gateway", f"version {theirs}, this is {version('baton')}", "use one version for the whole cluster")
