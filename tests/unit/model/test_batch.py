"""Packing scheduled pieces into the arrays of one step."""

import numpy as np
import pytest

from common.model.batch import Row, build_step, wanted_part


def test_a_chunk_and_a_decode_row_lie_behind_each_other():
    step = build_step(
        [Row([11, 12, 13], 2, [7, 3], wants_logits=False), Row([21], 4, [5, 9, 1], wants_logits=True)], block_size=4
    )
    assert step.token_ids.tolist() == [11, 12, 13, 21]
    assert step.positions.tolist() == [2, 3, 4, 4]
    assert step.slot_mapping.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4, 9 * 4]
    assert step.cu_seqlens_q.tolist() == [0, 3, 4]
    assert step.seq_lens.tolist() == [5, 5]
    assert step.block_tables.tolist() == [[7, 3], [5, 9]]  # only what the tokens need
    assert step.logits_rows.tolist() == [3]


def test_tables_are_padded_and_types_are_what_kernels_take():
    step = build_step([Row([1] * 9, 0, [4, 5, 6], True), Row([2], 0, [8], True)], block_size=4)
    assert step.block_tables.tolist() == [[4, 5, 6], [8, -1, -1]]
    assert step.logits_rows.tolist() == [8, 9]
    kinds = [step.token_ids, step.positions, step.slot_mapping, step.logits_rows]
    assert {array.dtype for array in kinds} == {np.dtype(np.int64)}
    assert {array.dtype for array in (step.cu_seqlens_q, step.seq_lens, step.block_tables)} == {np.dtype(np.int32)}


def test_no_row_may_want_logits():
    assert build_step([Row([1, 2], 0, [0], False)], 4).logits_rows.tolist() == []


def test_a_table_that_does_not_cover_its_tokens_is_refused():
    with pytest.raises(ValueError, match="9 tokens need 3 blocks, the table has 2"):
        build_step([Row([1], 8, [0, 1], True)], 4)


@pytest.mark.parametrize("rows", [[], [Row([], 0, [1], True)]])
def test_an_empty_step_is_refused(rows: list[Row]):
    with pytest.raises(ValueError, match="at least one"):
        build_step(rows, 4)


def test_the_wanted_part_sees_what_the_whole_step_has_stored():
    rows = [
        Row([11, 12, 13], 2, [7, 3], wants_logits=True),
        Row([21], 4, [5, 9, 1], wants_logits=False),
        Row([31, 32], 0, [6], wants_logits=False, wants_all_logits=True),
    ]
    part = wanted_part(build_step(rows, block_size=4))
    assert part is not None
    assert part.token_ids.tolist() == [13, 31, 32]
    assert part.positions.tolist() == [4, 0, 1]
    assert part.slot_mapping.tolist() == [-1, -1, -1]
    assert part.cu_seqlens_q.tolist() == [0, 1, 3]
    assert part.seq_lens.tolist() == [5, 2]
    assert part.block_tables.tolist() == [[7, 3], [6, -1]]
    assert part.logits_rows.tolist() == [0, 1, 2]
    kinds = (part.cu_seqlens_q, part.seq_lens, part.block_tables)
    assert {array.dtype for array in kinds} == {np.dtype(np.int32)}
    assert wanted_part(part) is None  # all of it is wanted


def test_the_wanted_part_may_be_empty():
    part = wanted_part(build_step([Row([1, 2], 0, [0], False)], 4))
    assert part is not None
    assert len(part.token_ids) == len(part.seq_lens) == 0
    assert part.cu_seqlens_q.tolist() == [0]
