"""Which product is taken: the rule's shape, not its measured numbers."""

import pytest

from kernels.cpu.product_rule import ALWAYS, FEW, largest_rows


@pytest.mark.parametrize("level", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_single_rows_are_always_ours_and_bfloat16_ends_first(level: str):
    assert 1 <= largest_rows(level, False, is_bfloat16=True) <= largest_rows(level, False, is_bfloat16=False)


def test_where_the_processor_multiplies_tiles_many_rows_in_bfloat16_are_torchs():
    assert largest_rows("avx512_bf16", True, is_bfloat16=True) == FEW
    assert largest_rows("avx512_bf16", True, is_bfloat16=False) == ALWAYS
