"""What ``baton up`` starts."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from compose.child import ChildSpec
from compose.passed_on import SETTLED, PassedOn, passed_on, passed_on_options
from compose.plan import STOP_MARGIN_S, Site, client_model_name, cores, forget_roles, plan_cluster
from compose.up_config import UpConfig
from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig

SITE = Site(Path("/m/small"), "small", 8123, "redis://:pw@127.0.0.1:7/0", cluster_token="hush", log_dir=Path("/logs"))
NOTHING = PassedOn()


def flags(spec: ChildSpec) -> dict[str, str]:
    words = spec.argv[4:]
    return dict(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 else {"odd": " ".join(words)}


def test_one_gateway_and_the_workers_asked_for() -> None:
    plan = plan_cluster(UpConfig(prefill=2, decode=3), NOTHING, SITE, {})
    assert plan.gateway.argv[1:4] == ("-P", "-m", "gateway")
    assert [spec.name for spec in plan.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert {spec.argv[3] for spec in plan.workers} == {"prefill_worker", "decode_worker"}


def test_workers_get_the_options_of_the_pool() -> None:
    options = {"dtype": "bfloat16", "device": "cpu", "block_size": 32, "kv_blocks": 9, "max_model_len": 512}
    passed = passed_on(options | {"transport": "grpc"})
    for spec in plan_cluster(UpConfig(threads=3), passed, SITE, {}).workers:
        given = flags(spec)
        assert given["--model"] == "/m/small"
        assert given["--worker-id"] == spec.name
        assert (given["--dtype"], given["--device"], given["--block-size"]) == ("bfloat16", "cpu", "32")
        assert (given["--kv-blocks"], given["--max-model-len"], given["--threads"]) == ("9", "512", "3")
        assert given["--transport"] == "grpc"
        assert spec.env["OMP_NUM_THREADS"] == "3"
        assert spec.env["OMP_WAIT_POLICY"] == "passive"
        assert given["--role-dir"] == "/logs"


def test_a_start_forgets_the_roles_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "prefill-0.role").write_text("decode")
    (tmp_path / "prefill-0.log").write_text("")
    forget_roles(replace(SITE, log_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["prefill-0.log"]


def test_cores_are_divided_among_the_workers() -> None:
    (one,) = plan_cluster(UpConfig(prefill=0, decode=1), NOTHING, SITE, {}).workers
    assert flags(one)["--threads"] == str(cores())
    many = plan_cluster(UpConfig(prefill=cores(), decode=cores()), NOTHING, SITE, {}).workers
    assert {flags(spec)["--threads"] for spec in many} == {"1"}


def test_secrets_travel_by_environment() -> None:
    passed = passed_on({"admin_key": "root", "api_key": ("a1", "b2")})
    plan = plan_cluster(UpConfig(), passed, SITE, {})
    assert (plan.gateway.env["BATON_ADMIN_KEY"], plan.gateway.env["BATON_API_KEY"]) == ("root", "a1 b2")
    for spec in (plan.gateway, *plan.workers):
        for secret in ("hush", "root", "a1", "b2"):
            assert secret not in spec.argv
        assert "pw" not in " ".join(spec.argv)
        assert spec.env["BATON_CLUSTER_TOKEN"] == "hush"
        assert spec.env["BATON_REDIS"] == SITE.redis_url


def test_what_up_has_read_does_not_reach_the_processes_a_second_time_and_the_rest_does() -> None:
    environ = {"BATON_PORT": "9999", "BATON_LOG_LEVEL": "DEBUG", "BATON_ADMIN_KEY_FILE": "/key", "BATON_X": "1"}
    plan = plan_cluster(UpConfig(), passed_on({"log_level": "ERROR"}), SITE, environ | {"PATH": "/bin"})
    for spec in (plan.gateway, *plan.workers):
        assert not {"BATON_PORT", "BATON_LOG_LEVEL", "BATON_ADMIN_KEY_FILE"} & spec.env.keys()
        assert (spec.env["BATON_X"], spec.env["PATH"]) == ("1", "/bin")
        assert "--log-level ERROR" in " ".join(spec.argv)
    assert "--port 8123" in " ".join(plan.gateway.argv)


def test_options_reach_those_that_have_them() -> None:
    passed = passed_on(
        {"preemption": "swap", "tool_parser": "hermes", "drain_seconds": 3.0, "served_model_name": "mine"}
    )
    plan = plan_cluster(UpConfig(), passed, SITE, {})
    assert "--tool-parser hermes" in " ".join(plan.gateway.argv)
    assert "--preemption" not in plan.gateway.argv
    for spec in plan.workers:
        assert "--preemption swap" in " ".join(spec.argv)
        assert "--tool-parser" not in spec.argv
    for spec in (plan.gateway, *plan.workers):
        assert spec.stop_s == 3.0 + STOP_MARGIN_S
        assert "--served-model-name mine" in " ".join(spec.argv)


def test_every_option_of_a_process_is_one_of_up_or_is_settled_by_it() -> None:
    own = {field.name for field in fields(UpConfig)}
    found = {option.name: option for option in passed_on_options()}
    assert not own & found.keys()
    for owner in (GatewayConfig, WorkerConfig):
        for field in fields(owner):
            assert (field.name in SETTLED) != (field.name in found)
            if field.name in found:
                assert owner in found[field.name].owners
                assert field.default == found[field.name].default
                assert found[field.name].help


def test_the_gateway_waits_for_a_prefill_worker_only_when_there_is_to_be_one() -> None:
    assert "--prefill-expected" in plan_cluster(UpConfig(), NOTHING, SITE, {}).gateway.argv
    assert "--prefill-expected" not in plan_cluster(UpConfig(prefill=0), NOTHING, SITE, {}).gateway.argv


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
        ({"threads": -1}, "--th"),
    ],
)
def test_an_option_out_of_range_is_named(change: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        replace(UpConfig(), **change)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"block_size": 0}, "--block-size"),
        ({"kv_memory": "much"}, "--kv-memory"),
        ({"planner_itl_s": 0}, "--planner-itl"),
    ],
)
def test_so_is_one_that_is_passed_on_before_anything_is_started(change: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        passed_on(change)
