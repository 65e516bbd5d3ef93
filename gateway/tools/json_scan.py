"""Finding the end of a JSON value in text that comes in pieces. It looks at quotes and brackets only."""

_OPEN, _CLOSE = "{[", "}]"
_ENDS_SCALAR = ",}] \t\r\n"
SPACE = " \t\r\n"


class JsonScanner:
    """Reads one value. Owned by whoever reads what is around it."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, start: int) -> int:
        """Read ``text`` from ``start``, where the value begins or goes on; return where it ends or the text does."""
        for at in range(start, len(text)):
            if self._is_scalar and text[at] in _ENDS_SCALAR:
                self.is_done = True
                return at  # what follows a number or a word is not a part of it
            self._read(text[at])
            if self.is_done:
                return at + 1
        return len(text)

    def _read(self, character: str) -> None:
        if self._in_string:
            self._read_in_string(character)
        elif character == '"':
            self._in_string = True
        elif character in _OPEN:
            self._depth += 1
        elif character in _CLOSE:
            self._depth -= 1
            self.is_done = self._depth <= 0
        elif self._depth == 0:
            self._is_scalar = True

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            self.is_done = self._depth == 0
