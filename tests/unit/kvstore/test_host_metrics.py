"""What a worker measures about itself."""

from prometheus_client import generate_latest

from common.ids import Epoch
from common.messages import Role
from kvstore.host.metrics import HostMetrics
from tests.support.stub_decode import record


def page(metrics: HostMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_a_worker_that_takes_the_other_role_shows_the_new_one_only() -> None:
    metrics = HostMetrics()
    for role in (Role.PREFILL, Role.DECODE):
        metrics.show(lambda role=role: record("worker-0", role, epoch=Epoch(1)))
    assert 'baton_worker_running{role="decode",worker="worker-0"}' in page(metrics)
    assert 'role="prefill"' not in page(metrics)


def test_pulls_that_fail_are_counted_and_not_timed() -> None:
    metrics = HostMetrics()
    metrics.pulled(0.2, True)
    metrics.pulled(9.0, False)
    shown = page(metrics)
    assert 'baton_kv_transfers_total{result="complete"} 1.0' in shown
    assert 'baton_kv_transfers_total{result="failed"} 1.0' in shown
    assert "baton_kv_transfer_seconds_sum 0.2" in shown


def test_every_series_is_there_before_anything_has_happened() -> None:
    shown = page(HostMetrics())
    for name in (
        "baton_worker_step_seconds_count",
        "baton_worker_step_sequences_count",
        "baton_kv_transfer_seconds_count",
    ):
        assert f"{name} 0.0" in shown
    assert 'baton_kv_transfers_total{result="failed"} 0.0' in shown
