"""Where the KV of a layer lies in a block."""

import pytest
import torch

from common.errors import ConfigError
from common.model.spec import LayerSpec
from kvstore.layout import KvLayout


def test_offsets_follow_each_other_without_gaps():
    layout = KvLayout((LayerSpec(2, 3, 5), LayerSpec(1, 7, 2)), 4, torch.float32)
    assert layout.k_offsets == (0, 24 + 40)
    assert layout.v_offsets == (24, 64 + 28)
    assert layout.block_elements == 64 + 28 + 8
    assert layout.block_bytes == 400


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)])
def test_bytes_follow_the_dtype(dtype: torch.dtype, num_bytes: int):
    assert KvLayout((LayerSpec(1, 8, 8),), 16, dtype).block_bytes == 256 * num_bytes


def test_a_layout_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one token"):
        KvLayout((LayerSpec(1, 8, 8),), 0, torch.float32)
    with pytest.raises(ConfigError, match="without attention layers"):
        KvLayout((), 16, torch.float32)
