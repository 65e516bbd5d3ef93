"""Structured output through the split: valid whoever samples, and the same tokens remote, local, moved or preempted."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from common.constraint import Constraint, Preamble
from common.messages import PlanKind
from common.sampling import FinishReason
from tests.support.split import Split, split
from tests.support.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.anyio

ROWS = {"type": "array", "items": {"enum": ["red", "green", 'blue "sky"', 7]}, "minItems": 6, "maxItems": 9}
TREE = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 999}, "rows": ROWS, "ok": {"type": "boolean"}},
    "required": ["id", "rows", "ok"],
    "additionalProperties": False,
}
SCHEMA = Constraint.json_schema(json.dumps(TREE))
LIMIT = 300


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 120), k=40)


def asked(seed: int, **changes: Any) -> dict[str, Any]:
    """Return sampling parameters; half of the seeds are greedy."""
    base = {"constraint": SCHEMA, "max_tokens": LIMIT, "eos_token_ids": (EOS_TOKEN_ID,), "seed": seed}
    return base | {"temperature": 0.0 if seed % 2 else 1.2} | changes


def check(value: Any) -> None:
    assert list(value) == ["id", "rows", "ok"]
    assert 1 <= value["id"] <= 999
    assert 6 <= len(value["rows"]) <= 9


async def many(cluster: Split, kind: PlanKind, seeds: range) -> list[list[int]]:
    answers = await asyncio.gather(*(cluster.generate(prompt(seed), kind, **asked(seed)) for seed in seeds))
    assert {answer.error for answer in answers} == {None}
    return [answer.token_ids for answer in answers]


async def test_a_schema_holds_and_the_tokens_are_the_same_everywhere(
    model: Path, tokenizer: Tokenizer, redis_url: str, scheduling: str
):
    seeds = range(6)
    async with split(str(model), redis_url, async_scheduling=scheduling) as cluster:
        alone = [await cluster.generate(prompt(seed), **asked(seed)) for seed in seeds]
        expected = [answer.token_ids for answer in alone]
        for kind in PlanKind:
            assert await many(cluster, kind, seeds) == expected
        for seed, token_ids in enumerate(expected[:3]):
            for cut in (1, len(token_ids) // 2, len(token_ids) - 1):
                moved = await cluster.generate(prompt(seed) + token_ids[:cut], num_prompt_tokens=40, **asked(seed))
                assert moved.token_ids == token_ids[cut:]
    async with split(str(model), redis_url, kv_blocks=24, async_scheduling=scheduling) as cluster:
        for kind in PlanKind:
            assert await many(cluster, kind, seeds) == expected
        assert cluster.decode.counters()["preemptions"] > 0
    for answer in alone:
        assert answer.finish is FinishReason.STOP, tokenizer.decode(answer.token_ids)
        check(json.loads(tokenizer.decode(answer.token_ids)))


@pytest.mark.parametrize("kind", PlanKind)
async def test_every_kind_of_structure_ends_when_it_is_complete(
    model: Path, tokenizer: Tokenizer, redis_url: str, kind: PlanKind
):
    async with split(str(model), redis_url) as cluster:

        async def text(constraint: Constraint, **changes: Any) -> str:
            answer = await cluster.generate(prompt(1), kind, **asked(1, constraint=constraint, **changes))
            assert answer.finish is FinishReason.STOP
            return str(tokenizer.decode(answer.token_ids))

        options = ["The capital", "Paris", "日本"]
        assert await text(Constraint.choice(options)) in options
        assert re.fullmatch("[0-9]{3}-[a-c]{2}", await text(Constraint.regex("[0-9]{3}-[a-c]{2}")))
        assert await text(Constraint.grammar('start: "<" /[xy]{3}/ ">"')) in {
            f"<{a}{b}{c}>" for a in "xy" for b in "xy" for c in "xy"
        }
        # what else says when to end gives way: min_tokens, ignore_eos, a bias towards the end, penalties
        word = Constraint.choice(["Paris"])
        for changes in (
            {"min_tokens": 50},
            {"eos_token_ids": ()},
            {"logit_bias": ((EOS_TOKEN_ID, 100.0),)},
            {"repetition_penalty": 1.5, "presence_penalty": 2.0, "bad_words": tuple((n,) for n in range(3, 400))},
        ):
            assert await text(word, **changes) == "Paris"


async def test_thinking_comes_first_and_goes_on_anywhere_with_the_same_tokens(
    model: Path, tokenizer: Tokenizer, redis_url: str
):
    end = 77
    constraint = msgspec.structs.replace(SCHEMA, preamble=Preamble(end))
    seeds = range(4)
    changes: dict[str, Any] = {"constraint": constraint, "logit_bias": ((end, 4.0),), "temperature": 1.0}
    async with split(str(model), redis_url) as cluster:
        for seed in seeds:
            answers = [await cluster.generate(prompt(seed), kind, **asked(seed, **changes)) for kind in PlanKind]
            token_ids = answers[0].token_ids
            assert [answer.token_ids for answer in answers] == [token_ids] * len(answers)
            at = token_ids.index(end)
            check(json.loads(tokenizer.decode(token_ids[at + 1 :])))
            for cut in (1, at, at + 1, at + 2, len(token_ids) - 1):
                moved = await cluster.generate(
                    prompt(seed) + token_ids[:cut], num_prompt_tokens=40, **asked(seed, **changes)
                )
                assert moved.token_ids == token_ids[cut:]


async def test_a_first_token_that_completes_the_answer_moves_no_blocks(
    model: Path, tokenizer: Tokenizer, redis_url: str
):
    digit = Constraint.regex("[0-9]")
    async with split(str(model), redis_url) as cluster:
        answer = await cluster.generate(prompt(3), **asked(3, constraint=digit, max_tokens=5))
        assert len(answer.token_ids) == 1
        assert answer.finish is FinishReason.STOP
        assert tokenizer.decode(answer.token_ids).isdigit()
        assert cluster.decode.counters()["pulled_tokens"] == 0


async def test_one_that_cannot_be_compiled_is_refused_and_disturbs_nobody(model: Path, redis_url: str):
    wrong = Constraint.json_schema('{"type": "array", "uniqueItems": true}')
    async with split(str(model), redis_url) as cluster:
        refused, good = await asyncio.gather(
            cluster.generate(prompt(1), **asked(1, constraint=wrong)), cluster.generate(prompt(2), **asked(2))
        )
        assert refused.error == "invalid_request_error"
        assert good.finish is FinishReason.STOP


async def test_one_that_becomes_too_complex_fails_alone(model: Path, redis_url: str):
    explodes = Constraint.regex("[a-z]?(a{1000}){1000}|[0-9]{9}x")
    async with split(str(model), redis_url) as cluster:
        failed, good = await asyncio.gather(
            cluster.generate(prompt(1), **asked(1, constraint=explodes)), cluster.generate(prompt(2), **asked(2))
        )
        assert failed.error in ("invalid_request_error", None)
        assert good.finish is FinishReason.STOP


async def test_one_aborted_while_its_grammar_is_compiled_leaves_nothing(model: Path, redis_url: str):
    many_properties = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}
    slow = Constraint.json_schema(json.dumps(many_properties))
    async with split(str(model), redis_url) as cluster:
        answer = await cluster.generate(prompt(1), leave_after=1, **asked(1, constraint=slow))
        assert len(answer.token_ids) == 1
        await cluster.wait_idle()
