"""The dashboard and the alerts of compose/ ask only for what a gateway and the workers really tell Prometheus."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from tests.support.gateway_bench import open_bench
from tests.support.split import split
from tests.support.tiny_models import build

COMPOSE = Path(__file__).parents[2] / "compose"
PROMETHEUS, GRAFANA = COMPOSE / "prometheus", COMPOSE / "grafana"

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
BY_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to whatever it scrapes."""

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\s*[\w(])")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_WORDS = {"or", "and", "unless", "by", "without", "on", "ignoring"}

Names = dict[str, set[str]]
"""Labels by the name of a sample; none where nothing has been counted yet."""


def queries() -> Iterator[tuple[str, str]]:
    """Yield where each PromQL expression of the repository is used, and the expression."""
    for panel in json.loads((GRAFANA / "dashboards" / "baton.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def selected(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that a query names, and the labels that it selects by."""
    plain = re.sub(r"\[[^]]*\]", "", _GROUPING.sub("", query))
    for name, matchers in _SELECTOR.findall(plain):
        if name not in _WORDS:
            yield name, set(re.findall(r"(\w+)\s*[=!]", matchers))


def grouped(query: str) -> set[str]:
    """Return the labels that a query groups by."""
    return {label.strip() for labels in _GROUPING.findall(query) for label in labels.split(",")}


def read(page: str, names: Names) -> None:
    """Add what one /metrics page shows to ``names``."""
    for family in text_string_to_metric_families(page):
        for suffix in SUFFIXES.get(family.type, ("",)):
            names[family.name + suffix] |= set()
        for sample in family.samples:
            names[sample.name] |= sample.labels.keys()


@pytest.fixture
async def told(redis: Redis, redis_url: str, tmp_path: Path) -> Names:
    """What a gateway, a prefill worker and a decode worker tell after each has had work."""
    build("llama", tmp_path / "llama")
    names: Names = defaultdict(set)
    async with split(str(tmp_path / "llama"), redis_url, metrics_port=0) as cluster:
        await cluster.generate(list(range(3, 63)))
        async with httpx2.AsyncClient(trust_env=False) as client:
            for host in (cluster.prefill, cluster.decode):
                read((await client.get(f"http://127.0.0.1:{host.metrics_port}/metrics")).text, names)
    async with open_bench(redis, redis_url, tmp_path) as bench:
        await bench.prefill(await bench.decode())
        await bench.gateway(prefill_expected=True)
        await bench.complete([5] * 100)
        read((await bench.client.get("/metrics")).text, names)
    names["up"] |= set()
    return names


@pytest.mark.anyio
async def test_every_query_asks_for_metrics_and_labels_that_exist(told: Names) -> None:
    unknown: list[Any] = []
    for where, query in queries():
        metrics = list(selected(query))
        assert metrics or query == "vector(0)", (where, query)
        unknown += [(where, name) for name, _ in metrics if name not in told]
        for name, labels in metrics:
            if told.get(name):  # one without labels has not counted anything here
                unknown += [(where, name, label) for label in labels - told[name] - BY_PROMETHEUS]
        known = set().union(*(told.get(name, set()) for name, _ in metrics)) | BY_PROMETHEUS
        unknown += [(where, "by", label) for label in grouped(query) - known if _has_labels(metrics, told)]
    assert unknown == []


def _has_labels(metrics: list[tuple[str, set[str]]], told: Names) -> bool:
    return all(told.get(name) for name, _ in metrics)


def test_a_query_is_read_as_prometheus_reads_it() -> None:
    query = 'sum by (le, role) (rate(a_bucket{job=~"x-.*", le="1"}[5m])) / on (le) sum(b_total) > 0.5 or vector(0)'
    assert [name for name, _ in selected(query)] == ["a_bucket", "b_total"]
    assert next(selected(query))[1] == {"job", "le"}
    assert grouped(query) == {"le", "role"}


def test_prometheus_scrapes_the_ports_that_are_served() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {name: sd["port"] for job in jobs for sd in job["dns_sd_configs"] for name in sd["names"]}
    assert scraped == {
        "gateway": int(services["gateway"]["environment"]["BATON_PORT"]),
        "prefill": int(services["prefill"]["environment"]["BATON_METRICS_PORT"]),
        "decode": int(services["decode"]["environment"]["BATON_METRICS_PORT"]),
    }


def test_grafana_finds_what_is_provisioned() -> None:
    mounts = dict(
        volume.split(":")[:2]
        for volume in yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    )
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/baton.yaml").read_text())["providers"][0]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    panels = json.loads((GRAFANA / "dashboards/baton.json").read_text())["panels"]
    uids = {target["datasource"]["uid"] for panel in panels for target in panel.get("targets", ())}
    assert uids == {source["uid"]}
