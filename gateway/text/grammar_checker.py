"""Refuses constraints that cannot be compiled, before anything is sent: on a thread, and each only once."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from common.constraint import Constraint
from common.errors import InvalidRequest
from common.grammar import byte_tokenizer, compile_grammar

MAX_COMPILE_S = 1.0
"""Processor seconds that compiling may take; a worker then takes about as long."""

MAX_REMEMBERED = 256
"""Constraints that were found good and are not compiled again."""


class GrammarChecker:
    """Owns its thread, until :meth:`close`. ``special_tokens`` are those that a grammar may name."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self._tokenizer = byte_tokenizer(special_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._good: OrderedDict[Constraint, None] = OrderedDict()

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: Constraint, param: str) -> None:
        """Raise InvalidRequest, naming ``param``, when workers could not compile ``constraint``."""
        if constraint in self._good:
            self._good.move_to_end(constraint)
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, constraint)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param} {error.message}", param=param) from error
        self._good[constraint] = None
        if len(self._good) > MAX_REMEMBERED:
            self._good.popitem(last=False)

    def _compile(self, constraint: Constraint) -> None:
        began = time.thread_time()
        compile_grammar(constraint, self._tokenizer)
        if time.thread_time() - began > MAX_COMPILE_S:
            raise InvalidRequest(f"takes more than {MAX_COMPILE_S:g} s to compile")
