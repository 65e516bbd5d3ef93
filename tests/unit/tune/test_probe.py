"""What a probe reads of a stream."""

import httpx2
import pytest

from compose.tune.probe import event_lines, num_tokens

pytestmark = pytest.mark.anyio


async def test_a_separator_within_a_text_ends_no_line() -> None:
    event = 'data: {"choices":[{"text":"a\u2028b\x85c","token_ids":[5,6]}]}\n\ndata: [DONE]\n\n'
    lines = [line async for line in event_lines(httpx2.Response(200, content=event.encode()))]
    assert [num_tokens(line) for line in lines if line] == [2, 0]
