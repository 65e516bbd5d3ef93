"""The oracle: what transformers itself generates, greedily, in float32."""

import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common.sampling import BeamParams

PAD = 511
"""Fills up the answers of a beam search to the length of the longest."""


class Reference:
    """A model loaded by transformers alone. Answers are cached by prompt."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._searches: dict[tuple[object, ...], list[list[int]]] = {}

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return the next ``num_tokens`` greedy tokens; end-of-sequence tokens do not end them."""
        known = self._answers.get(tuple(token_ids), [])
        if len(known) < num_tokens:
            known = self._answers[tuple(token_ids)] = self._generate(token_ids, num_tokens)
        return known[:num_tokens]

    async def greedy_aside(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return the same, computed on a thread, so that what runs on the event loop goes on."""
        return await asyncio.to_thread(self.greedy, token_ids, num_tokens)

    async def beam_search(
        self, token_ids: list[int], beam: BeamParams, max_tokens: int, ends: tuple[int, ...]
    ) -> list[list[int]]:
        """Return all complete answers of a beam search, the best first, each with its end, filled up with PAD.

        Cached, as it is slow.
        """
        key = (tuple(token_ids), beam, max_tokens, ends)
        if key not in self._searches:
            self._searches[key] = await asyncio.to_thread(self._beam_search, token_ids, beam, max_tokens, ends)
        return self._searches[key]

    @torch.inference_mode()
    def _beam_search(
        self, token_ids: list[int], beam: BeamParams, max_tokens: int, ends: tuple[int, ...]
    ) -> list[list[int]]:
        output = self._model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            num_beams=beam.width,
            num_return_sequences=beam.width,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=list(ends),
            pad_token_id=PAD,
            do_sample=False,
        )
        return [[int(token) for token in row[len(token_ids) :]] for row in output]

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return ``[len(token_ids), vocab]`` log probabilities: row ``p`` is of the token behind position ``p``."""
        logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    @torch.inference_mode()
    def _generate(self, token_ids: list[int], num_tokens: int) -> list[int]:
        output = self._model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            do_sample=False,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(token_ids) :]]
