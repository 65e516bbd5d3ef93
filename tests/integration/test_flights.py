"""Steps that are launched behind others give the tokens of steps that are run one by one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import InternalError
from common.ids import RequestId
from common.messages import SampledToken
from common.model.load import load_model
from common.model.runner import ModelRunner
from common.sampling import SamplingParams
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.flight import Flight
from kvstore.host.meter import StepMeter
from kvstore.host.reading import Computed
from kvstore.host.stepper import Stepper
from kvstore.layout import KvLayout
from kvstore.prefix_hash import PrefixHasher
from kvstore.sequence import Chunk, Sequence
from kvstore.storage import KvStorage
from tests.kernels.devices import on_each_device
from tests.support.fake_recorder import FakeRecorder
from tests.support.sequences import ROOT

pytestmark = pytest.mark.anyio

BLOCK, NUM_BLOCKS, NUM_TOKENS = 4, 64, 12
PARAMS = (
    SamplingParams(NUM_TOKENS, temperature=0.0),
    SamplingParams(NUM_TOKENS, temperature=1.3, top_k=50, seed=3),
    SamplingParams(NUM_TOKENS, temperature=0.9, seed=4, repetition_penalty=1.5, frequency_penalty=0.2),
    SamplingParams(NUM_TOKENS, temperature=0.9, seed=5, typical_p=0.9, logprobs=2, bad_words=((7, 8), (9,))),
)


class Bench:
    """A stepper over a tiny model, and sequences of which each begins with a prompt of its own."""

    def __init__(self, model: Path, device: str, *, reads_late: bool, recorded: bool = False) -> None:
        loaded = load_model(str(model), dtype="float32", device=device, max_model_len=64)
        spec = loaded.spec
        storage = KvStorage(KvLayout(spec.layers, BLOCK, spec.dtype), NUM_BLOCKS, spec.device)
        self.runner = ModelRunner(loaded, storage.layer_views(), BLOCK)
        if recorded:
            self.runner.record(FakeRecorder(), batch_sizes=(1, 4))
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.thread = ComputeThread()
        self.stepper = Stepper(self.thread, self.runner, BLOCK, StepMeter(), reads_late=reads_late)

    def sequences(self) -> list[Sequence]:
        made = []
        for number, params in enumerate(PARAMS):
            table = BlockTable(self.pool, PrefixHasher(ROOT, BLOCK))
            prompt = [10 + number, *range(20, 23 + 2 * number)]
            made.append(Sequence(RequestId(f"r{number}"), prompt, len(prompt), params, table))
        return made

    async def run(self, *, ahead: bool) -> list[list[SampledToken]]:
        """Return the tokens of each sequence."""
        sequences = self.sequences()
        tokens: dict[Sequence, list[SampledToken]] = {sequence: [] for sequence in sequences}
        chunks = [Chunk(sequence, sequence.num_tokens) for sequence in sequences]
        for chunk in chunks:
            chunk.sequence.table.grow(chunk.sequence.num_tokens + NUM_TOKENS)
        flight: Flight | None = self.stepper.launch(chunks)
        for step in range(NUM_TOKENS):
            assert flight is not None
            behind = None
            if ahead and step + 1 < NUM_TOKENS:
                behind = self.stepper.launch_behind(flight, [Chunk(sequence, 1) for sequence in sequences])
            for result in await self.stepper.results(flight):
                take(result, tokens[result.chunk.sequence])
            if not ahead and step + 1 < NUM_TOKENS:
                behind = self.stepper.launch([Chunk(sequence, 1) for sequence in sequences])
            flight = behind
        for sequence in sequences:
            self.stepper.release(sequence.table, sequence)
        return list(tokens.values())


def take(result: Computed, tokens: list[SampledToken]) -> None:
    sequence = result.chunk.sequence
    (token,) = result.tokens
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.token_ids.append(token.token_id)
    tokens.append(token)


@pytest.fixture
async def benches() -> AsyncIterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.thread.close()


@on_each_device
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("reads_late", [False, True])
async def test_the_tokens_are_those_of_one_step_after_the_other(
    model: Path, benches: list[Bench], device: str, reads_late: bool, recorded: bool
):
    bench = Bench(model, device, reads_late=reads_late, recorded=recorded)
    benches.append(bench)
    expected = await bench.run(ahead=False)
    assert await bench.run(ahead=True) == expected
    assert bench.pool.counts().held == 0


@pytest.mark.parametrize("reads_late", [False, True])
async def test_blocks_stay_until_both_steps_have_ended(model: Path, benches: list[Bench], reads_late: bool):
    bench = Bench(model, "cpu", reads_late=reads_late)
    benches.append(bench)
    stays, leaves, *_ = bench.sequences()
    for sequence in (stays, leaves):
        sequence.table.grow(sequence.num_tokens + 2)
    flight = bench.stepper.launch([Chunk(sequence, sequence.num_tokens) for sequence in (stays, leaves)])
    behind = bench.stepper.launch_behind(flight, [Chunk(stays, 1), Chunk(leaves, 1)])
    results = await bench.stepper.results(flight)
    assert len(results) == 2
    bench.stepper.release(leaves.table, leaves)
    assert list(bench.stepper.leaving()) == [leaves.table]
    assert len(leaves.table.block_ids) > 0
    await bench.stepper.results(behind)
    assert list(bench.stepper.leaving()) == []
    assert list(leaves.table.block_ids) == []
    bench.stepper.release(stays.table, stays)
    assert bench.pool.counts().held == 0


@pytest.mark.parametrize("reads_late", [False, True])
async def test_a_step_that_fails_takes_the_one_behind_it_along(model: Path, benches: list[Bench], reads_late: bool):
    bench = Bench(model, "cpu", reads_late=reads_late)
    benches.append(bench)
    sequence, *_ = bench.sequences()
    sequence.table.grow(sequence.num_tokens + 2)

    def fail() -> None:
        raise ValueError("on purpose")

    flight = bench.stepper.launch([Chunk(sequence, sequence.num_tokens)], fail)
    behind = bench.stepper.launch_behind(flight, [Chunk(sequence, 1)])
    for one in (flight, behind):
        with pytest.raises(InternalError, match="could not compute"):
            await bench.stepper.results(one)
    bench.stepper.release(sequence.table, sequence)
    assert bench.pool.counts().held == 0
    assert len(await bench.run(ahead=True)) == len(PARAMS)
