"""Sizes with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("2GiB", 2 * 1024**3),
        ("2 gib", 2 * 1024**3),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("512MB", 512_000_000),
        ("512M", 512_000_000),
        ("1Ti", 1024**4),
    ],
)
def test_reads_sizes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text, flag="--kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "2iB", "1e9", "nan", "2GiBB", "2 Gi B"])
def test_refuses_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory .* not a size"):
        parse_size(text, flag="--kv-memory")


@given(st.integers(min_value=0, max_value=2**60))
def test_a_formatted_size_reads_back_within_its_rounding(num_bytes: int) -> None:
    back = parse_size(format_size(num_bytes), flag="--any")
    assert abs(back - num_bytes) <= max(1, num_bytes * 0.051)
