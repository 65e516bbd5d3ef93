"""Remembers in a file which role a worker took last, so that one that dies after a change starts again in it.

The supervisor removes the files at the cluster's own start: a fresh cluster begins with the ratio it was
asked for, and a worker that is restarted inside one keeps the ratio as it was changed.
"""

import logging
from pathlib import Path

from common.ids import WorkerId
from common.messages import Role

log = logging.getLogger(__name__)


SUFFIX = ".role"


class RoleFile:
    """The file of one worker in ``folder``, which workers may share; None remembers nothing.

    A file that cannot be used is as good as none.
    """

    def __init__(self, folder: Path | None, worker_id: WorkerId) -> None:
        self._path = None if folder is None else folder / f"{worker_id}{SUFFIX}"

    def read(self, otherwise: Role) -> Role:
        """Return the role that was taken last, ``otherwise`` when that is not known."""
        if self._path is None:
            return otherwise
        try:
            return Role(self._path.read_text().strip())
        except (OSError, ValueError):
            return otherwise

    def write(self, role: Role) -> None:
        """Remember ``role``; readers see the old content or the new."""
        if self._path is None:
            return
        part = self._path.with_name(self._path.name + ".part")
        try:
            part.write_text(f"{role}\n")
            part.replace(self._path)
        except OSError as error:
            log.warning(
                "the role file %s cannot be written, a restart begins as before: %s", self._path, error.strerror
            )
