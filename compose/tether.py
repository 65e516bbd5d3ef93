"""Run a command that dies with its parent, in a group of its own: ``python -I -S tether.py PARENT_PID COMMAND...``.

The kernel sends SIGKILL to this process when the thread that started it ends, however it ends, and keeps doing so after
``exec``; so it works for any program, also one that is frozen. Linux only: elsewhere the command simply runs, and
outlives a parent that was killed with SIGKILL. Standard library only, since it runs without site-packages.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Tie this process to its parent, part it from the parent's group, and become ``command``."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:  # it died before the call above
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
