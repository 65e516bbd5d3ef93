"""What single tokens say, as log probabilities name them: every token has its own text, and its bytes.

A token that is not whole characters is named by its bytes (``bytes:\\xe2\\x82``, as OpenAI's service does it), so that
two of them are never taken for the same. Special tokens have the text that they are written with.
"""

from tokenizers import Tokenizer

from gateway.text.detokenizer import token_bytes


class TokenTexts:
    """The texts of a tokenizer's tokens, looked up once each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = token_bytes(tokenizer)
        self._known: dict[int, bytes] = {}
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def is_silent(self, token_id: int) -> bool:
        """Whether the token is a special one, which texts leave out."""
        return token_id in self._special

    def data(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text, or as which it is written."""
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._bytes_of(token_id)
        return data

    def text(self, token_id: int) -> str:
        """Return the token's name."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])
