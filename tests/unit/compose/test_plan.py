"""What ``baton up`` starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from compose.child import ChildSpec
from compose.plan import Site, client_model_name, cores, forget_roles, plan_cluster
from compose.up_config import UpConfig

SITE = Site(Path("/m/small"), "small", 8123, "redis://:pw@127.0.0.1:7/0", cluster_token="hush", log_dir=Path("/logs"))


def flags(spec: ChildSpec) -> dict[str, str]:
    words = spec.argv[4:]
    return dict(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 else {"odd": " ".join(words)}


def test_one_gateway_and_the_workers_asked_for() -> None:
    plan = plan_cluster(UpConfig(prefill=2, decode=3), SITE, {})
    assert plan.gateway.argv[1:4] == ("-P", "-m", "gateway")
    assert [spec.name for spec in plan.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert {spec.argv[3] for spec in plan.workers} == {"prefill_worker", "decode_worker"}


def test_workers_get_the_options_of_the_pool() -> None:
    config = UpConfig(
        dtype="bfloat16", device="cpu", block_size=32, kv_blocks=9, max_model_len=512, threads=3, transport="grpc"
    )
    for spec in plan_cluster(config, SITE, {}).workers:
        given = flags(spec)
        assert given["--model"] == "/m/small"
        assert given["--worker-id"] == spec.name
        assert (given["--dtype"], given["--device"], given["--block-size"]) == ("bfloat16", "cpu", "32")
        assert (given["--kv-blocks"], given["--max-model-len"], given["--threads"]) == ("9", "512", "3")
        assert given["--transport"] == "grpc"
        assert spec.env["OMP_NUM_THREADS"] == "3"
        assert spec.env["OMP_WAIT_POLICY"] == "passive"
        assert given["--role-file"] == f"/logs/{spec.name}.role"


def test_a_start_forgets_the_roles_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "prefill-0.role").write_text("decode")
    (tmp_path / "prefill-0.log").write_text("")
    forget_roles(replace(SITE, log_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["prefill-0.log"]


def test_cores_are_divided_among_the_workers() -> None:
    (one,) = plan_cluster(UpConfig(prefill=0, decode=1), SITE, {}).workers
    assert flags(one)["--threads"] == str(cores())
    many = plan_cluster(UpConfig(prefill=cores(), decode=cores()), SITE, {}).workers
    assert {flags(spec)["--threads"] for spec in many} == {"1"}


def test_secrets_travel_by_environment() -> None:
    plan = plan_cluster(UpConfig(), SITE, {})
    for spec in (plan.gateway, *plan.workers):
        assert "hush" not in " ".join(spec.argv)
        assert "pw" not in " ".join(spec.argv)
        assert spec.env["BATON_CLUSTER_TOKEN"] == "hush"
        assert spec.env["BATON_REDIS"] == SITE.redis_url


def test_variables_for_up_do_not_reach_the_processes_and_others_do() -> None:
    environ = {"BATON_PORT": "9999", "BATON_LOG_LEVEL": "DEBUG", "PATH": "/bin"}
    plan = plan_cluster(UpConfig(), SITE, environ)
    for spec in (plan.gateway, *plan.workers):
        assert "BATON_PORT" not in spec.env
        assert spec.env["BATON_LOG_LEVEL"] == "DEBUG"
        assert spec.env["PATH"] == "/bin"
    assert "--port 8123" in " ".join(plan.gateway.argv)


def test_the_gateway_waits_for_a_prefill_worker_only_when_there_is_to_be_one() -> None:
    assert "--prefill-expected" in plan_cluster(UpConfig(), SITE, {}).gateway.argv
    assert "--prefill-expected" not in plan_cluster(UpConfig(prefill=0), SITE, {}).gateway.argv


def test_clients_know_a_folder_by_its_name_and_others_by_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert client_model_name(str(folder), folder) == "mine"
    assert client_model_name("owner/name", tmp_path / "snapshots" / "abc") == "owner/name"


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"prefill": -1}, "--prefill"),
        ({"decode": 0}, "--decode"),
        ({"port": 70_000}, "--port"),
        ({"block_size": 0}, "--block-size"),
        ({"kv_blocks": -1}, "--kv-blocks"),
        ({"kv_memory": "much"}, "--kv-memory"),
        ({"max_model_len": -1}, "--max-model-len"),
        ({"threads": -1}, "--threads"),
    ],
)
def test_an_option_out_of_range_is_named(change: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        replace(UpConfig(), **change)
