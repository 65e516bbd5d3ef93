"""How much KV memory do samples and beams of one prompt save by sharing blocks? As PagedAttention, section 6.3.

Starts one prefill and one decode worker and a gateway, asks for parallel samples and for beam searches of several
widths, and compares the blocks that the sequences name with the blocks that they hold, summed over all steps. Two sets
have about the lengths of the paper's: Alpaca (19 tokens in, 58 out) and ShareGPT (161 in, 338 out); the texts are this
project's own. Run: ``python -m benchmarks.sharing``.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from benchmarks.local_prefill import processes

WIDTHS = (2, 4, 6)
HEARTBEAT_S = 3.0
"""A worker's counts are in the gateway's metrics after this long."""

SHORT = (
    "Give three tips for staying healthy when you work at a desk all day long.",
    "Explain in simple words why the sky is blue in the day and red in the evening.",
    "Write a short letter to a friend in which you say that you cannot come to her party.",
    "Name the largest rivers of Africa and say through which countries each of them flows.",
)
LONG_CHARACTERS = 700


@dataclass(frozen=True, slots=True)
class TextSet:
    """Prompts, and how many tokens are written for each."""

    name: str
    prompts: tuple[str, ...]
    max_tokens: int


def text_sets() -> list[TextSet]:
    """Return the two sets."""
    page = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()
    return [TextSet("short (19 -> 58)", SHORT, 58), TextSet("long (161 -> 338)", (page[:LONG_CHARACTERS],), 338)]


def block_steps(client: httpx2.Client) -> tuple[float, float]:
    """Return the blocks that sequences named and those that sharing saved, summed over all steps so far."""
    time.sleep(HEARTBEAT_S)
    lines = client.get("/metrics").text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"baton_worker_{name}_total{{"))

    return total("forked_block_steps"), total("saved_block_steps")


def saved_share(client: httpx2.Client, texts: TextSet, **fields: Any) -> float:
    """Return the part of the blocks that sharing saved while ``texts`` were continued."""
    before = block_steps(client)
    for prompt in texts.prompts:
        body = {"prompt": prompt, "max_tokens": texts.max_tokens, "ignore_eos": True} | fields
        client.post("/v1/completions", json=body).raise_for_status()
    named, saved = (after - start for after, start in zip(block_steps(client), before, strict=True))
    return saved / named


def kinds() -> Iterator[dict[str, Any]]:
    """Yield the fields that ask for each kind of answers, in the order of the table's columns."""
    yield from ({"n": width, "seed": 1} for width in WIDTHS)
    yield from ({"use_beam_search": True, "beam_width": width} for width in WIDTHS)


def main() -> None:
    """Measure and print the table."""
    console = Console(width=120)
    table = Table(title="KV blocks saved by sharing, % (paper: samples 6 to 30, beams 38 to 66)")
    for column in ("set", *(f"{kind} {width}" for kind in ("samples", "beams") for width in WIDTHS)):
        table.add_column(column, justify="right")
    with processes() as urls, httpx2.Client(base_url=urls["local"], timeout=600.0, trust_env=False) as client:
        for texts in text_sets():
            shares = []
            for fields in kinds():
                shares.append(f"{100 * saved_share(client, texts, **fields):.1f}")
                console.log(texts.name, fields, shares[-1])
            table.add_row(texts.name, *shares)
    console.print(table)


if __name__ == "__main__":
    main()
