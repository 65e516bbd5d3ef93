"""The content hash: golden vectors, and what must and must not change it."""

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Fingerprint
from kvstore.prefix_hash import PrefixHasher, chain_hashes, root_hash

FINGERPRINT = Fingerprint(
    model="model-digest",
    tokenizer="tokenizer-digest",
    kv_shape="shape-digest",
    kv_dtype="bfloat16",
    quantization="none",
    block_size=16,
    layout="layout",
    protocol=1,
)
ROOT = root_hash(FINGERPRINT, "")

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def test_golden_vectors():
    assert ROOT.hex() == "4101171f9a0b838c8e4faec8b48bc5a9"
    assert root_hash(FINGERPRINT, "salt", "adapter").hex() == "ba9d41eccbfca7712652fa5fb25feb9c"
    assert [block.hex() for block in chain_hashes(ROOT, range(40), 16)] == [
        "582b8abc0a4dd0ccd31e88c5cf966b1c",
        "8c7a7f45400d35f658f9ddbdd291e2c0",
    ]
    assert [block.hex() for block in chain_hashes(ROOT, [0, 2**32 - 1], 1)] == [
        "e8a4e14702ff3bd9ab00911f50dfbbef",
        "a23bf707e90834a469102719b9d2c27a",
    ]


def test_the_rule_is_as_written():
    expected = hashlib.blake2b(ROOT + struct.pack("<4I", 1, 2, 3, 70_000), digest_size=16).digest()
    assert chain_hashes(ROOT, [1, 2, 3, 70_000], 4) == [expected]


@pytest.mark.parametrize("field", ["model", "kv_shape", "kv_dtype", "quantization", "block_size"])
def test_the_root_depends_on_what_the_kv_depends_on(field: str):
    other = 32 if field == "block_size" else "other"
    assert root_hash(msgspec.structs.replace(FINGERPRINT, **{field: other}), "") != ROOT


def test_the_root_separates_salts_adapters_and_shifted_fields():
    roots = {
        root_hash(FINGERPRINT, salt, adapter)
        for salt, adapter in [("", ""), ("a", ""), ("", "a"), ("ab", ""), ("a", "b")]
    }
    assert len(roots) == 5


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_that_is_no_uint32_is_refused(token_id: int):
    with pytest.raises(struct.error):
        chain_hashes(ROOT, [token_id], 1)


@given(tokens, st.integers(1, 7), st.lists(st.integers(0, 60), max_size=6))
def test_hashing_in_any_steps_equals_hashing_at_once(token_ids: list[int], block_size: int, steps: list[int]):
    hasher = PrefixHasher(ROOT, block_size)
    whole = chain_hashes(ROOT, token_ids, block_size)
    for step in steps:
        assert list(hasher.extend(token_ids[:step])) == whole[: min(step, len(token_ids)) // block_size]
    assert list(hasher.extend(token_ids)) == whole


@given(tokens, tokens, st.integers(1, 5))
def test_truncated_and_forked_hashers_follow_their_own_tokens(head: list[int], tail: list[int], block_size: int):
    hasher = PrefixHasher(ROOT, block_size)
    hasher.extend(head + tail)
    twin = hasher.fork()
    hasher.truncate(len(head))
    assert list(hasher.extend(head + tail[::-1])) == chain_hashes(ROOT, head + tail[::-1], block_size)
    assert list(twin.extend(head + tail)) == chain_hashes(ROOT, head + tail, block_size)


@given(tokens, st.integers(0, 59))
def test_one_other_token_changes_its_block_and_all_after_it(token_ids: list[int], position: int):
    if position >= len(token_ids):
        token_ids = token_ids + [0] * (position + 1 - len(token_ids))
    changed = token_ids.copy()
    changed[position] ^= 1
    before, after = chain_hashes(ROOT, token_ids, 4), chain_hashes(ROOT, changed, 4)
    first = position // 4
    assert before[:first] == after[:first]
    assert all(a != b for a, b in zip(before[first:], after[first:], strict=True))
