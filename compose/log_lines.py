"""Which lines of a child's log a person at the terminal should see.

Lines in the formats of :mod:`common.logs` carry their level; a line without one (a traceback, a library's print)
belongs to the line before it.
"""

import re

_RECORD = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (([DIWEC]) )\S+ (.*)")
_JSON_RECORD = re.compile(rb'\{"time": "[^"]*", "level": "([a-z])')
_LOUD = (b"W", b"E", b"C")


class LogLines:
    """Cuts a stream of bytes into lines and knows how loud each is. Owned by the reader of one child's output."""

    def __init__(self) -> None:
        self._rest = b""
        self._level = b"D"

    def feed(self, data: bytes, *, quiet: bool) -> list[str]:
        """Return the complete lines of ``data`` to show: from WARNING up when ``quiet``, else from INFO up.

        Time and process are left out of them: the terminal shows a line when it comes, and says whose it is.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = []
        for line in lines:
            record = _RECORD.fullmatch(line)
            if record:
                self._level = record[2]
            elif as_json := _JSON_RECORD.match(line):
                self._level = as_json[1].upper()
            if line and (self._level in _LOUD or (self._level == b"I" and not quiet)):
                shown.append((record[1] + record[3] if record else line).decode(errors="replace"))
        return shown
