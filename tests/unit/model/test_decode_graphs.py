"""Decode steps by recording: which ones, padded to which batch size, with which spare rows."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from common.model.batch import Row, StepInput, build_step
from common.model.decode_graphs import BATCH_SIZES, DecodeGraphs
from common.model.step_tensors import StepTensors
from tests.support.fake_recorder import FakeRecorder

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """What the model was given, as it was then."""

    slots: list[int]
    lengths: list[int]
    starts: list[int]


@dataclass(slots=True)
class FakeModel:
    """Gives each row's token id, position and sum of its block table's used part as logits."""

    seen: list[Seen] = field(default_factory=list)

    def compute(self, step: StepTensors) -> Tensor:
        rows = step.rows
        self.seen.append(Seen(rows.slot_mapping.tolist(), rows.seq_lens.tolist(), rows.cu_seqlens_q.tolist()))
        blocks = torch.arange(rows.block_tables.shape[1]) < -(-rows.seq_lens // BLOCK_SIZE)[:, None]
        return torch.stack((step.token_ids, step.positions, (rows.block_tables * blocks).sum(1)), dim=1).float()


def decode_step(num_rows: int) -> StepInput:
    """Sequences of 1 to 17 tokens, each with its own blocks."""
    rows = [Row([100 + i], i % 17, [i + b for b in range(i % 17 // BLOCK_SIZE + 1)], True) for i in range(num_rows)]
    return build_step(rows, BLOCK_SIZE)


def expected(step: StepInput) -> Tensor:
    tables = np.where(step.block_tables < 0, 0, step.block_tables).sum(1)
    return torch.tensor(np.stack((step.token_ids, step.positions, tables), axis=1)).float()


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (65, 80), (256, 256)])
def test_a_step_runs_in_the_smallest_batch_size_that_holds_it(num_rows: int, size: int):
    model = FakeModel()
    graphs = DecodeGraphs(model.compute, FakeRecorder(), CPU, MAX_BLOCKS)
    step = decode_step(num_rows)
    logits = graphs.run(step)
    assert logits is not None
    assert torch.equal(logits, expected(step))
    assert len(model.seen[-1].slots) == size


def test_tokens_that_only_the_device_knows_stand_in_for_the_steps_own():
    graphs = DecodeGraphs(FakeModel().compute, FakeRecorder(), CPU, MAX_BLOCKS)
    step = decode_step(3)
    logits = graphs.run(step, torch.tensor([7, 8, 9]))
    assert logits is not None
    assert logits[:, 0].tolist() == [7, 8, 9]
    assert torch.equal(logits[:, 1:], expected(step)[:, 1:])


def test_spare_rows_store_nothing_and_see_no_keys():
    model = FakeModel()
    graphs = DecodeGraphs(model.compute, FakeRecorder(), CPU, MAX_BLOCKS)
    graphs.run(decode_step(8))
    graphs.run(decode_step(5))
    seen = model.seen[-1]
    assert seen.slots[5:] == [-1, -1, -1]
    assert seen.lengths == [1, 2, 3, 4, 5, 0, 0, 0]
    assert seen.starts == list(range(9))
    assert all(set(seen.slots) == {-1} for seen in model.seen[: len(BATCH_SIZES)])  # while recording


def test_every_batch_size_is_recorded_the_largest_first():
    recorder = FakeRecorder()
    DecodeGraphs(FakeModel().compute, recorder, CPU, MAX_BLOCKS)
    assert recorder.sizes == sorted(BATCH_SIZES, reverse=True)


def test_other_steps_are_left_to_the_caller():
    graphs = DecodeGraphs(FakeModel().compute, FakeRecorder(), CPU, MAX_BLOCKS, batch_sizes=(1, 2))
    chunk, decode = Row([1, 2, 3], 0, [0], True), Row([1], 3, [0], True)
    assert graphs.run(build_step([chunk, decode], BLOCK_SIZE)) is None
    assert graphs.run(build_step([decode, Row([1], 3, [0], False)], BLOCK_SIZE)) is None  # wants no logits
    assert graphs.run(decode_step(3)) is None
    assert graphs.run(build_step([Row([1], 20, list(range(6)), True)], BLOCK_SIZE)) is None
    assert graphs.run(decode_step(2)) is not None
