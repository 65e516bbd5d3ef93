"""What ``baton doctor`` makes of what it sees; the whole is in tests/integration/test_doctor.py."""

import json
from pathlib import Path

import msgspec
import pytest

from compose.cluster_checks import CheckedCluster, CheckedWorker, check_fingerprints, check_members
from compose.finding import Finding, Verdict
from compose.machine_checks import check_model, check_open_files
from compose.redis_checks import check_clock, check_eviction, check_latency, check_memory, check_version
from compose.transfer_check import Moved, judge, moved
from tests.support.stub_decode import FINGERPRINT
from tests.support.tiny_tokenizers import byte_level, write_model


def worker(name: str = "decode-0", **changes: object) -> CheckedWorker:
    role = name.partition("-")[0]
    fine = CheckedWorker(name, role, "127.0.0.1:1", "ready", connected=True, tick_age_s=0.0, fingerprint=FINGERPRINT)
    return msgspec.structs.replace(fine, **changes)


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.subject: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (check_open_files(1024), Verdict.WARNING),
        (check_open_files(65536), Verdict.OK),
        (check_open_files(-1), Verdict.OK),
        (check_version("7.2.4"), Verdict.OK),
        (check_version("8.0.1"), Verdict.OK),
        (check_version("7.0.15"), Verdict.WARNING),
        (check_version(""), Verdict.WARNING),
        (check_latency([0.1, 0.2, 40.0]), Verdict.OK),
        (check_latency([9.0, 8.0, 7.0]), Verdict.WARNING),
        (check_eviction("noeviction"), Verdict.OK),
        (check_eviction("allkeys-lru"), Verdict.FAILED),
        (check_eviction(""), Verdict.WARNING),
        (check_memory(10, 0), Verdict.OK),
        (check_memory(90, 100), Verdict.WARNING),
        (check_clock(-1.9), Verdict.OK),
        (check_clock(-2.1), Verdict.WARNING),
        (judge(Moved(), Moved(4096, 2, 0), 0.5), Verdict.OK),
        (judge(Moved(), Moved(4096, 2, 1), 0.5), Verdict.FAILED),
        (judge(Moved(4096, 2, 1), Moved(4096, 2, 1), 0.5), Verdict.FAILED),
        (check_fingerprints([]), Verdict.SKIPPED),
        (check_fingerprints([worker(), worker("prefill-0")]), Verdict.OK),
    ],
)
def test_each_fact_has_its_verdict(finding: Finding, verdict: Verdict) -> None:
    assert finding.verdict is verdict
    assert bool(finding.fix) == (verdict in (Verdict.WARNING, Verdict.FAILED))
    assert ("fix:" in finding.lines()) == bool(finding.fix)


def test_workers_that_cannot_exchange_blocks_are_named_with_the_field() -> None:
    other = worker("prefill-0", fingerprint=msgspec.structs.replace(FINGERPRINT, kv_dtype="bfloat16"))
    finding = check_fingerprints([worker(), other])
    assert finding.verdict is Verdict.FAILED
    assert "decode-0 and prefill-0 differ in kv_dtype" in finding.what


def test_a_whole_cluster_is_well() -> None:
    cluster = CheckedCluster((worker(), worker("prefill-0")), "up")
    assert set(verdicts(list(check_members(cluster))).values()) == {Verdict.OK}


def test_what_a_cluster_lacks_is_said() -> None:
    lost = worker(connected=False)
    stuck = worker("decode-1", tick_age_s=12.0)
    found = verdicts(list(check_members(CheckedCluster((lost, stuck), "down"))))
    assert found == {
        "gateway's redis": Verdict.FAILED,
        "decode workers": Verdict.OK,
        "prefill workers": Verdict.WARNING,
        "decode-0": Verdict.FAILED,
        "decode-1": Verdict.FAILED,
    }
    assert verdicts(list(check_members(CheckedCluster((), "up"))))["decode workers"] is Verdict.FAILED


def test_a_model_that_is_not_named_is_skipped() -> None:
    assert verdicts(list(check_model(""))) == {"model files": Verdict.SKIPPED}


def test_a_folder_without_a_tokenizer_fails(tmp_path: Path) -> None:
    assert verdicts(list(check_model(str(tmp_path)))) == {"model files": Verdict.FAILED}


def weights(path: Path) -> None:
    """Write a file of one tensor of 8 bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)


@pytest.mark.parametrize(
    ("cut", "listed", "verdict"),
    [
        (0, ["a.safetensors"], Verdict.OK),
        (1, ["a.safetensors"], Verdict.FAILED),
        (30, ["a.safetensors"], Verdict.FAILED),
        (0, ["a.safetensors", "b.safetensors"], Verdict.FAILED),
    ],
    ids=["whole", "one byte short", "header cut", "a shard is missing"],
)
def test_weights_must_be_whole(tmp_path: Path, cut: int, listed: list[str], verdict: Verdict) -> None:
    folder = write_model(tmp_path, byte_level())
    weights(folder / "a.safetensors")
    content = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(content[: len(content) - cut])
    index = {"weight_map": {str(number): name for number, name in enumerate(listed)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = verdicts(list(check_model(str(folder))))
    assert found == {"tokenizer": Verdict.OK, "weights": verdict}


def test_counters_of_all_workers_are_summed() -> None:
    page = (
        'baton_worker_pull_bytes_received_total{worker="decode-0",role="decode"} 100.0\n'
        'baton_worker_pull_bytes_received_total{worker="decode-1",role="decode"} 2.0e3\n'
        'baton_worker_pull_frames_received_total{worker="decode-0",role="decode"} 3.0\n'
        "baton_worker_pull_corrupt_frames 7.0\n"
    )
    assert moved(page) == Moved(2100.0, 3.0, 0.0)
