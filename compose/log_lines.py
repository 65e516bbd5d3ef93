"""Which lines of a child's log a person at the terminal should see.

Lines in the format of :mod:`common.logs` carry their level; a line without one (a traceback, a library's print)
belongs to the line before it.
"""

import re

_LEVEL = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([DIWEC]) ")
_LOUD = (b"W", b"E", b"C")


class LogLines:
    """Cuts a stream of bytes into lines and knows how loud each is. Owned by the reader of one child's output."""

    def __init__(self) -> None:
        self._rest = b""
        self._level = b"D"

    def feed(self, data: bytes, *, quiet: bool) -> list[str]:
        """Return the complete lines of ``data`` to show: from WARNING up when ``quiet``, else from INFO up."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = []
        for line in lines:
            match = _LEVEL.match(line)
            if match:
                self._level = match[1]
            if line and (self._level in _LOUD or (self._level == b"I" and not quiet)):
                shown.append(line.decode(errors="replace"))
        return shown
