"""The simulated cluster: the arithmetic of an idle one, no work is lost, and the planner follows a load that turns."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.messages import Role
from compose.tune.cluster import Run, SimCluster
from compose.tune.fit import fit
from compose.tune.outcome import best, is_good, outcome
from compose.tune.probe import Probe, Probes
from compose.tune.profile import CostProfile, read_profile, write_profile
from compose.tune.report import outcome_table, plot, recommendation
from compose.tune.trace import Arrival, poisson
from compose.tune.tune import try_ratios
from gateway.planner.planner import Action
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio

PROFILE = CostProfile(
    prefill_base_s=0.02,
    prompt_token_s=0.001,
    prompt_attention_s=0.0,
    decode_base_s=0.03,
    sequence_s=0.002,
    context_token_s=0.0,
    local_overhead_s=0.02,
    remote_overhead_s=0.05,
    transfer_base_s=0.03,
    transfer_token_s=0.0,
    change_s=0.5,
    kv_blocks=4000,
)
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)


def simulate(arrivals: list[Arrival], ratio: Ratio = Ratio(1, 1), **options: bool) -> Run:  # noqa: B008 - frozen
    return SimCluster(PROFILE, ratio, TARGETS, **options).run(arrivals)


def test_one_remote_request_takes_what_its_parts_take() -> None:
    (request,) = simulate([Arrival(1.0, 500, 4)]).requests
    assert request.ttft_s == pytest.approx(0.05 + 0.02 + 500 * 0.001)
    first, *others = request.gaps()
    assert first == pytest.approx(0.03 + 0.032)
    assert others == pytest.approx([0.032, 0.032])


def test_one_local_request_is_read_where_it_is_answered() -> None:
    (request,) = simulate([Arrival(0.0, 40, 3)]).requests
    assert request.ttft_s == pytest.approx(0.02 + 0.02 + 40 * 0.001)
    assert request.gaps() == pytest.approx([0.032, 0.032])


def test_prompts_of_one_step_are_read_once_although_the_first_ends_its_answer_there() -> None:
    run = simulate([Arrival(0.0, 100, 1), Arrival(0.0, 100, 1), Arrival(0.0, 100, 1)])
    assert [len(request.token_times) for request in run.requests] == [1, 1, 1]
    first, second, third = (request.ttft_s for request in run.requests)
    assert first == pytest.approx(0.05 + 0.02 + 100 * 0.001)  # alone: the others were not queued yet
    assert second == third == pytest.approx(first + 0.02 + 200 * 0.001)


def test_a_prompt_that_is_cached_is_not_read_twice() -> None:
    shared = (1, 2)
    run = simulate([Arrival(0.0, 1024, 2, shared), Arrival(5.0, 1024, 2, shared)])
    cold, warm = (request.ttft_s for request in run.requests)
    assert warm < cold / 4


arrivals = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0, 20),
        prompt_tokens=st.integers(1, 900),
        answer_tokens=st.integers(1, 40),
        hash_ids=st.sampled_from([(), (1,), (2, 3)]),
    ),
    min_size=1,
    max_size=15,
)


@given(arrivals, st.integers(1, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_request_is_answered_in_full_and_nothing_is_held_afterwards(
    found: list[Arrival], prefill: int, plans: bool
) -> None:
    cluster = SimCluster(PROFILE, Ratio(prefill, 4 - prefill), TARGETS, plans=plans)
    run = cluster.run(sorted(found, key=lambda arrival: arrival.at_s))
    for request in run.requests:
        assert len(request.token_times) == request.arrival.answer_tokens
        assert request.token_times == sorted(request.token_times)
    for worker in cluster.workers():
        worker.pool.check_integrity([])
        assert worker.pool.counts().held == 0


def test_the_same_load_gives_the_same_run() -> None:
    load = poisson(isl=300, osl=30, rate=2.0, seconds=20)
    first, second = (simulate(load, Ratio(2, 2), plans=True) for _ in range(2))
    assert [one.token_times for one in first.requests] == [one.token_times for one in second.requests]


# ---- a load that turns ----

PHASE_S = 300.0
FIXED = (Ratio(1, 3), Ratio(2, 2), Ratio(3, 1))


@pytest.fixture(scope="module")
def turning() -> list[Arrival]:
    """Prompts ten times as long as answers, then answers ten times as long as prompts."""
    reading = poisson(isl=1000, osl=100, rate=1.4, seconds=PHASE_S)
    writing = poisson(isl=100, osl=1000, rate=0.75, seconds=PHASE_S, start_s=PHASE_S, seed=100)
    return reading + writing


def good_by_phase(run: Run) -> list[int]:
    found = [0, 0]
    for request in run.requests:
        found[request.arrival.at_s >= PHASE_S] += is_good(request, TARGETS)
    return found


def test_auto_is_as_good_as_the_best_fixed_ratio_in_each_phase_of_a_load_that_turns(turning: list[Arrival]) -> None:
    fixed = {ratio: good_by_phase(simulate(turning, ratio)) for ratio in FIXED}
    auto = simulate(turning, Ratio(2, 2), plans=True)
    reached = good_by_phase(auto)
    for phase in (0, 1):
        assert reached[phase] >= 0.95 * max(found[phase] for found in fixed.values()), (reached, fixed)
    assert all(len(request.token_times) == request.arrival.answer_tokens for request in auto.requests)
    actions = [decision.action for at, decision in auto.decisions if at >= PHASE_S]
    assert actions[:2] == [Action.LOCAL_TOKENS, Action.TO_DECODE]
    assert [change.role for change in auto.changes] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    print(f"\ngood answers by phase: fixed {fixed}; auto {reached}; changes {auto.changes}")  # noqa: T201


# ---- what is made of it ----


def test_the_recommended_ratio_is_the_one_with_most_goodput_and_is_marked(tmp_path: Path) -> None:
    load = poisson(isl=1000, osl=50, rate=1.4, seconds=40)
    outcomes = try_ratios(PROFILE, load, TARGETS, 4, 64)
    assert [str(one.ratio) for one in outcomes] == ["1:3", "2:2", "3:1"]
    choice = best(outcomes, TARGETS)
    assert choice.goodput == max(one.goodput for one in outcomes)
    assert choice.ratio == Ratio(3, 1)
    assert outcomes[0].bottleneck == "prefill"
    assert "recommended: 3:1" in recommendation(outcomes, TARGETS)
    assert outcome_table(outcomes, TARGETS).row_count == 3
    pytest.importorskip("matplotlib")
    plot(outcomes, TARGETS, tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_answers_has_no_goodput() -> None:
    found = outcome(Run([]), Ratio(1, 1), TARGETS, 10.0)
    assert (found.goodput, found.good_share) == (0.0, 0.0)


def test_a_profile_is_read_as_it_was_written_and_another_file_is_refused(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE
    (tmp_path / "other.json").write_text('{"prefill_base_s": 1}')
    for name in ("other.json", "missing.json"):
        with pytest.raises(ConfigError, match="--profile"):
            read_profile(tmp_path / name)


def test_a_fit_of_measurements_made_by_a_profile_finds_that_profile() -> None:
    """What an idle simulated cluster measures, at the sizes that a calibration asks for."""
    profile = msgspec.structs.replace(
        PROFILE,
        prompt_attention_s=2e-7,
        context_token_s=2e-6,
        transfer_token_s=1e-5,
        decode_contention=0.5,
        prefill_contention=0.25,
    )

    def probes(*arrivals: Arrival) -> list[Probe]:
        run = SimCluster(profile, Ratio(1, 1), TARGETS).run(arrivals)
        return [
            Probe(
                asked.prompt_tokens,
                asked.prompt_tokens > 64,
                [at - asked.at_s for at in one.token_times],
                began=asked.at_s,
            )
            for one in run.requests
            for asked in [one.arrival]
        ]

    lengths = (16, 32, 48, 128, 256, 512, 1024, 1536)
    alone = probes(*(Arrival(30.0 * n, length, 4) for n, length in enumerate(lengths)))
    batches = [probes(*[Arrival(0.0, length, 40)] * size) for length in (32, 640) for size in (1, 2, 4, 8)]
    queued = [probes(*[Arrival(0.0, 512, 1)] * 4)]
    both = probes(*[Arrival(0.0, 32, 160)] * 4, *(Arrival(2.0 + 1.5 * n, 1024, 1) for n in range(3)))
    found = fit(Probes(alone, batches, queued, both[:4], both[4:]), kv_blocks=profile.kv_blocks)
    for name in ("prompt_token_s", "decode_base_s", "sequence_s", "prefill_base_s", "prefill_contention"):
        assert getattr(found, name) == pytest.approx(getattr(profile, name), rel=0.15), name
    assert found.decode_contention == pytest.approx(profile.decode_contention, rel=0.3)  # some steps had no neighbour
    load = [Arrival(0.0, 700, 40), Arrival(0.1, 32, 60), Arrival(0.5, 900, 40)]
    again = SimCluster(found, Ratio(1, 1), TARGETS).run(load).requests
    truth = SimCluster(profile, Ratio(1, 1), TARGETS).run(load).requests
    for one, other in zip(again, truth, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=0.15)
        assert one.itl_s == pytest.approx(other.itl_s, rel=0.15)
