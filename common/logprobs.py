"""How likely the model held a token: what workers compute and gateways show. Knows nothing of tensors."""

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Natural logarithms of probabilities at one position, by the model's own logits: before bias, penalties,
    temperature and everything else that sampling does to them."""

    logprob: float
    """Of the token that is there; may be minus infinity."""
    rank: int
    """1 for the most likely token, and so on."""
    top_ids: tuple[int, ...] = ()
    """The most likely tokens, best first; of equals the one with the lower id."""
    top_logprobs: tuple[float, ...] = ()
