"""Warms the prefixes of ``--pin-prefix`` and has the workers keep them, through restarts of workers.

Every life of a worker is told once which blocks to keep, whether it has them yet or not. A prefix that no worker holds
is computed, as any prompt is. With API keys there is one copy for each key, since keys share nothing.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BatonError
from common.ids import BlockHash, Epoch, WorkerId
from common.messages import Keep, Role, WorkerRecord
from common.sampling import SamplingParams
from common.services import KEEP
from gateway.http.salt import join_salt
from gateway.pinned_file import PinnedPrefix
from gateway.request.flow import Flow, FlowServices
from gateway.request.sample import Sample
from gateway.text.chat_template import ChatMessage
from gateway.text.text_stream import TextStream
from gateway.text.tokenizer import Tokenizer
from kvstore.prefix_hash import join_chain

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Whether everything is kept is looked at this often."""

WARM_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Pin:
    name: str
    token_ids: tuple[int, ...]
    cache_salt: str


class PinKeeper:
    """Owned by the gateway; works while :meth:`run` does."""

    def __init__(
        self,
        pinned: Sequence[PinnedPrefix],
        key_salts: Sequence[str],
        services: FlowServices,
        tokenizer: Tokenizer,
    ) -> None:
        self._pinned = pinned
        self._key_salts = key_salts or [""]
        self._services = services
        self._tokenizer = tokenizer
        self._pins: list[_Pin] = []
        self._told: set[tuple[WorkerId, Epoch]] = set()

    async def run(self) -> None:
        """Warm and keep until cancelled; with nothing to keep, return."""
        while self._pinned:
            try:
                await self._check()
            except BatonError as error:
                log.warning("prefixes are not kept yet: %s", error.message)
            await asyncio.sleep(CHECK_S)

    async def _check(self) -> None:
        cluster = self._services.cluster
        if not cluster.usable(Role.DECODE):
            return
        if not self._pins:
            self._pins = await self._make_pins(cluster.max_model_len())
        chains = [list((await self._services.locator.locate(p.token_ids, p.cache_salt)).chain) for p in self._pins]
        for worker in cluster.view().workers:
            await self._tell(worker.record, chains)
        for pin, chain in zip(self._pins, chains, strict=True):
            await self._warm(pin, chain)

    async def _make_pins(self, max_model_len: int) -> list[_Pin]:
        pins: list[_Pin] = []
        for pinned in self._pinned:
            token_ids = tuple(await self._tokens(pinned, max_model_len))
            salts = [join_salt(salt, pinned.cache_salt) for salt in dict.fromkeys(self._key_salts)]
            pins += [_Pin(pinned.name, token_ids, salt) for salt in salts]
        return pins

    async def _tokens(self, pinned: PinnedPrefix, max_model_len: int) -> list[int]:
        if pinned.prompt is not None:
            return await self._tokenizer.encode_prompt(pinned.prompt, max_model_len)
        assert pinned.system is not None
        chats = [[ChatMessage("system", pinned.system), ChatMessage("user", word)] for word in ("a", "0")]
        one, other = [await self._tokenizer.encode_chat(chat, max_model_len) for chat in chats]
        pairs = enumerate(zip(one, other, strict=False))
        return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]

    async def _tell(self, record: WorkerRecord, chains: Sequence[Sequence[BlockHash]]) -> None:
        life = (record.worker_id, record.epoch)
        if life in self._told:
            return
        client = self._services.cluster.client(record)
        try:
            await client.call(KEEP, Keep(record.epoch, tuple(join_chain(chain) for chain in chains)), CALL_TIMEOUT_S)
        except BatonError as error:
            log.warning("%s does not keep the pinned prefixes: %s", record.worker_id, error.message)
            return
        finally:
            await client.close()
        self._told.add(life)

    async def _warm(self, pin: _Pin, chain: Sequence[BlockHash]) -> None:
        """Have the prefix computed unless it is too short for a block or some worker holds it."""
        located = await self._services.locator.locate(pin.token_ids, pin.cache_salt)
        held = max(located.num_tokens.values(), default=0)
        if not chain or held >= len(chain) * located.block_size:
            return
        log.info("warming %s, %d tokens", pin.name, len(pin.token_ids))
        now = asyncio.get_running_loop().time()
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        flow = Flow(
            self._services,
            pin.token_ids,
            sampling,
            [
                Sample(
                    0,
                    TextStream(self._tokenizer.detokenizer(continues=pin.token_ids), (), sampling),
                    sampling.max_tokens,
                )
            ],
            arrived_at=now,
            deadline=now + WARM_TIMEOUT_S,
            cache_salt=pin.cache_salt,
            emit=lambda sample, piece: None,
        )
        try:
            async with asyncio.timeout(WARM_TIMEOUT_S):
                await flow.run()
        except TimeoutError:
            log.warning("%s was not warmed within %g s", pin.name, WARM_TIMEOUT_S)
        finally:
            flow.abort("the prefix is warm")
