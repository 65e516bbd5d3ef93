"""``python -m tests.compose``: the cluster of compose/compose.yaml in real containers, from the build to ``down``.

The commands that drive containers come from the environment: ENGINE (docker), BUILD (``docker build``), COMPOSE
(``docker compose``). Prints a line for each step, and exits with 1 at the first that does not hold. A model that is
prepared on this machine is given to the containers; else they fetch it.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import yaml

from compose import smollm2
from compose.cache import cache_dir
from compose.ports import free_port
from tests.compose.project import ROOT, Project, Tools

ADMIN_KEY = "compose-test-admin"
GATEWAY_IMAGE, WORKER_IMAGE = "baton-gateway:local", "baton-worker-cpu:local"
CLUSTER = ("redis", "secrets", "model", "gateway", "prefill", "decode")
BATON_UID = "10001"
NUM_TOKENS = 160
KILL_AFTER = 20
PROMPT = "Here is a long list of things that a relay runner has to think about before a race. " * 8
BODY = {
    "messages": [{"role": "user", "content": PROMPT + "Write a long story about such a race."}],
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer."""

    text: str
    route: str
    """The header that says who did what."""

    def worker(self, role: str) -> str:
        """Return the id of the worker that had ``role``."""
        parts = dict(part.split("=", 1) for part in self.route.split("; ") if "=" in part)
        return parts[role]


class Run:
    """The steps, in order."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._began = time.monotonic()

    def all(self) -> None:
        """Run every step; raises at the first that does not hold."""
        for step in (
            self.build,
            self.images_are_small_and_private,
            self.up,
            self.stream,
            self.restart_in_another_role,
            self.kill_decode_in_mid_stream,
            self.scale,
            self.hit_rates,
            self.prometheus,
            self.grafana,
            self.stop_in_order,
        ):
            self._say(step.__name__, step())

    def build(self) -> str:
        self._project.build("gateway", GATEWAY_IMAGE)
        self._project.build("worker-cpu", WORKER_IMAGE)
        sizes = [self._project.engine("image", "inspect", "--format", "{{.Size}}", image) for image in _IMAGES]
        return ", ".join(f"{image} {int(size) // 1_000_000} MB" for image, size in zip(_IMAGES, sizes, strict=True))

    def images_are_small_and_private(self) -> str:
        without = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'numba') if u.find_spec(n)])"
        found = self._project.engine("run", "--rm", GATEWAY_IMAGE, "python", "-c", without)
        _check(found == "[]", f"the gateway's image has {found}")
        users = {self._project.engine("run", "--rm", image, "id", "-u") for image in _IMAGES}
        _check(users == {BATON_UID}, f"the images run as {users}")
        return f"the gateway's has no torch, both run as user {BATON_UID}"

    def up(self) -> str:
        project = self._project
        project.up(*CLUSTER, prefill=2, decode=2)
        project.wait("the gateway is ready", lambda: project.status("/ready") == 200)
        project.wait("2 prefill and 2 decode workers are ready", lambda: self._ready() == {"prefill": 2, "decode": 2})
        project.wait("every container is healthy", self._all_are_healthy, limit_s=120)
        [redis] = project.containers("redis")
        policy = project.engine("exec", redis, "redis-cli", "config", "get", "maxmemory-policy").split()[-1]
        _check(policy == "noeviction", f"Redis evicts: {policy}")
        [gateway] = project.containers("gateway")
        published = project.engine("port", gateway)
        _check("127.0.0.1:" in published and "0.0.0.0" not in published, f"published: {published}")
        return f"2 prefill, 2 decode, all healthy; {published}; Redis {policy}"

    def stream(self) -> str:
        self._expected = self._stream()
        tokens_by = f"prefill {self._expected.worker('prefill')}, decode {self._expected.worker('decode')}"
        _check(self._expected.route.startswith("remote"), f"not prefilled by a prefill worker: {self._expected.route}")
        return f"{NUM_TOKENS} tokens, {len(self._expected.text)} characters; {tokens_by}"

    def kill_decode_in_mid_stream(self) -> str:
        killed: list[str] = []

        def kill(route: str) -> None:
            worker = Streamed("", route).worker("decode")
            self._project.engine("kill", "--signal", "KILL", _container(worker))
            killed.append(worker)

        answer = self._stream(kill)
        _check(len(killed) == 1, "nothing was killed")
        _check(answer.text == self._expected.text, "the text is not that of the undisturbed run")
        migrations = self._metric("baton_migrations_total")
        _check(migrations >= 1, "the answer has not moved")
        return f"{killed[0]} killed after {KILL_AFTER} pieces; the same {len(answer.text)} characters"

    def restart_in_another_role(self) -> str:
        """A worker that has ended and is started again takes the role that it was told last."""
        project = self._project
        changed = [one["worker"] for one in self._set_ratio("3:1")["changed"]]
        _check(len(changed) == 1, f"changed: {changed}")
        before = self._epoch(changed[0])
        project.engine("stop", _container(changed[0]))
        project.engine("start", _container(changed[0]))
        project.wait("it is back", lambda: self._epoch(changed[0]) not in (None, before))
        project.wait(
            "3 prefill workers and 1 decode worker are ready", lambda: self._ready() == {"prefill": 3, "decode": 1}
        )
        _check(self._stream().text == self._expected.text, "another text at 3:1")
        self._set_ratio("2:2")
        return f"{changed[0]} restarted as a prefill worker and back as one"

    def _set_ratio(self, ratio: str) -> dict[str, list[dict[str, str]]]:
        answer = self._project.client.post(
            "/v1/cluster/ratio", json={"ratio": ratio}, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        )
        _check(answer.status_code == 200, f"ratio {ratio}: {answer.text}")
        found: dict[str, list[dict[str, str]]] = answer.json()
        return found

    def _epoch(self, worker_id: str) -> int | None:
        """Return the epoch of a worker that is ready."""
        workers = self._project.client.get("/v1/cluster").json()["workers"]
        return next((one["epoch"] for one in workers if one["id"] == worker_id and one["state"] == "ready"), None)

    def scale(self) -> str:
        project = self._project
        project.up(*CLUSTER, prefill=2, decode=3)
        project.wait("5 workers are ready", lambda: sum(self._ready().values()) == 5)
        self._set_ratio("2:3")  # another container than before may have been the one to go back to decoding
        project.wait("2 prefill and 3 decode workers are ready", lambda: self._ready() == {"prefill": 2, "decode": 3})
        _check(self._stream().text == self._expected.text, "another text after scaling")
        return "2 prefill, 3 decode; the same text again"

    def hit_rates(self) -> str:
        stats = self._project.client.get(
            "/v1/cache/stats", params={"window": "all"}, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        ).json()
        queries = self._metric('baton_cache_query_tokens_total{role="prefill"}')
        [*workers] = self._project.containers("prefill")
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        pages = [self._project.engine("exec", worker, "python", "-c", ask) for worker in workers]
        _check(all("baton_worker_prefix_cache_queries_total" in page for page in pages), "a worker shows no metrics")
        _check(queries > 0, "no prompt was looked up")
        _check(stats["hit_tokens"] > 0, "the same prompt four times, and no hit")
        sources = ", ".join(f"{name} {tokens}" for name, tokens in stats["by_source"].items())
        return f"{stats['hit_tokens']} of {stats['queries_tokens']} prompt tokens, {stats['hit_rate']:.1%}: {sources}"

    def prometheus(self) -> str:
        if not self._project.has_image(_image_of("prometheus")):
            return "not run: its image cannot be had here"
        self._project.up("prometheus", prefill=2, decode=3)
        with self._watcher("PROMETHEUS_PORT") as client:
            self._project.wait(
                "all six are scraped", lambda: _targets(client) == {"baton-gateway": 1, "baton-worker": 5}
            )
            counted = client.get("/api/v1/query", params={"query": "count(baton_worker_running)"}).json()
            _check(counted["data"]["result"][0]["value"][1] == "5", f"workers are counted as {counted}")
            [group] = client.get("/api/v1/rules").json()["data"]["groups"]
            _check(not any(rule.get("lastError") for rule in group["rules"]), f"a rule fails: {group}")
        return f"finds 1 gateway and 5 workers by their services' names; {len(group['rules'])} alert rules"

    def grafana(self) -> str:
        if not self._project.has_image(_image_of("grafana")):
            return "not run: its image cannot be had here"
        self._project.up("grafana", prefill=2, decode=3)
        with self._watcher("GRAFANA_PORT") as client:
            self._project.wait("Grafana has the dashboard", lambda: _answers(client, "/api/dashboards/uid/baton"))
        return "has the dashboard, without a login"

    def _watcher(self, port: str) -> httpx2.Client:
        url = f"http://127.0.0.1:{self._project.settings[port]}"
        return httpx2.Client(base_url=url, trust_env=False, timeout=10.0)

    def stop_in_order(self) -> str:
        project = self._project
        began = time.monotonic()
        ids = {service: project.containers(service) for service in ("gateway", "prefill", "decode")}
        project.stop()
        codes = [project.inspect(one, "{{.State.ExitCode}}") for of_service in ids.values() for one in of_service]
        _check(set(codes) == {"0"}, f"exit codes {codes}")
        return f"{len(codes)} processes drained and ended with 0 in {time.monotonic() - began:.1f} s"

    def _stream(self, after_some: Callable[[str], None] | None = None) -> Streamed:
        text, num_pieces = "", 0
        with self._project.client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            _check(answer.status_code == 200, f"status {answer.status_code}")
            route = answer.headers["x-baton-route"]
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                _check("error" not in event, f"an error in the stream: {event}")
                text += event["choices"][0]["delta"].get("content") or ""
                num_pieces += 1
                if num_pieces == KILL_AFTER and after_some is not None:
                    after_some(route)
        return Streamed(text, route)

    def _ready(self) -> dict[str, int]:
        """Return how many workers of each role are ready."""
        workers = self._project.client.get("/v1/cluster").json()["workers"]
        ready = [worker["role"] for worker in workers if worker["state"] == "ready"]
        return {role: ready.count(role) for role in ("prefill", "decode")}

    def _all_are_healthy(self) -> bool:
        services = ("redis", "gateway", "prefill", "decode")
        return all(self._project.is_healthy(one) for service in services for one in self._project.containers(service))

    def _metric(self, sample: str) -> float:
        for line in self._project.client.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def _say(self, step: str, found: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began:7.1f} s  {step.replace('_', ' ')}: {found}\n")
        sys.stdout.flush()


def _container(worker_id: str) -> str:
    """Return the container of a worker, which is called after its first role, the container and the process."""
    return worker_id.partition("-")[2].rpartition("-")[0]


def _image_of(service: str) -> str:
    """Return the image that a service of compose.yaml uses by default."""
    found: str = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"][service]["image"]
    return found.partition(":-")[2].removesuffix("}")


def _targets(client: httpx2.Client) -> dict[str, int]:
    """Return how many targets of each job Prometheus reaches."""
    try:
        active = client.get("/api/v1/targets", params={"state": "active"}).json()["data"]["activeTargets"]
    except (httpx2.HTTPError, ValueError):
        return {}
    jobs = [target["labels"]["job"] for target in active if target["health"] == "up"]
    return {job: jobs.count(job) for job in jobs}


def _answers(client: httpx2.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx2.HTTPError:
        return False


_IMAGES = (GATEWAY_IMAGE, WORKER_IMAGE)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _settings(models: Path) -> dict[str, str]:
    """Return what differs from a user's first start."""
    settings = {
        "BATON_ADMIN_KEY": ADMIN_KEY,
        "BATON_GATEWAY_IMAGE": GATEWAY_IMAGE,
        "BATON_WORKER_IMAGE": WORKER_IMAGE,
        "BATON_KV_MEMORY": "256MiB",
        "BATON_THREADS": "1",
        "PROMETHEUS_PORT": str(free_port("127.0.0.1")),
        "GRAFANA_PORT": str(free_port("127.0.0.1")),
    }
    return settings | ({"BATON_MODELS": str(models)} if _give_model(models) else {})


def _give_model(models: Path) -> bool:
    """Put the small model, if it is prepared on this machine, where containers can read it."""
    prepared = Path("models", smollm2.RECIPE, smollm2.NAME)
    if not (cache_dir() / prepared).is_dir():
        return False
    shutil.copytree(cache_dir() / prepared, models / prepared)
    for folder in (models, *models.rglob("*")):
        folder.chmod(0o777 if folder.is_dir() else 0o644)  # the containers' user is another
    return True


def main() -> int:
    """Run all steps and clean up; return the exit status."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that it cleans up
    with tempfile.TemporaryDirectory(prefix="baton-compose-", ignore_cleanup_errors=True) as work:
        project = Project(
            Tools.from_environment(), f"batontest{os.getpid()}", _settings(Path(work)), free_port("127.0.0.1")
        )
        try:
            Run(project).all()
        except (AssertionError, RuntimeError, TimeoutError) as error:
            sys.stderr.write(f"{project.logs()}\nfailed: {error}\n")
            return 1
        finally:
            project.remove()
    sys.stdout.write("passed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
