"""Log probabilities against torch, and at the edges."""

import math

import pytest
import torch

from common.model.logprobs import logprobs_of


def test_they_equal_log_softmax_with_ranks_and_the_most_likely_in_order() -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(20, 300)
    token_ids = torch.randint(0, 300, (20,)).tolist()
    rows = torch.log_softmax(logits.double(), dim=-1)
    for row, token_id, known in zip(rows, token_ids, logprobs_of(logits, token_ids, [5] * 20), strict=True):
        assert known.logprob == pytest.approx(float(row[token_id]), abs=1e-9)
        assert known.rank == int((row > row[token_id]).sum()) + 1
        top = row.topk(5)
        assert list(known.top_ids) == top.indices.tolist()
        assert list(known.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-9)


def test_of_equals_the_lower_id_comes_first_and_no_more_than_there_are() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    (known,) = logprobs_of(logits, [3], [2])
    assert (known.rank, known.top_ids) == (1, (1, 2))
    assert logprobs_of(logits, [0], [9])[0].top_ids == (1, 2, 3, 0)
    assert logprobs_of(logits, [0], [0])[0].top_ids == ()


def test_an_impossible_token_is_minus_infinity_and_large_logits_do_not_overflow() -> None:
    (known,) = logprobs_of(torch.tensor([[1e4, -math.inf, 1e4]]), [1], [3])
    assert known.logprob == -math.inf
    assert known.top_logprobs == pytest.approx((-math.log(2), -math.log(2), -math.inf))
    assert logprobs_of(torch.zeros(0, 5), [], []) == []
