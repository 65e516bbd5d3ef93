"""``python -m compose.gpu_claim FOLDER COMMAND…``: run COMMAND on one GPU that no other worker of this machine uses.

Compose gives the same GPUs to each container of a scaled service. So every worker locks a file for one of them in
FOLDER, which all containers share, and sees no other. The lock belongs to the process, and is gone when it is.
"""

import fcntl
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from common.errors import BatonError, ConfigError, Unavailable

_DEVICES = Path("/dev")


def main(argv: list[str]) -> None:
    """Become the command, with its GPU in ``CUDA_VISIBLE_DEVICES``; exits with 1 when there is none for it."""
    folder, *command = argv
    try:
        gpu = claim(Path(folder), gpus_of(_DEVICES))
    except BatonError as error:
        sys.exit(f"error: {error.message}")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.execvp(command[0], command)


def gpus_of(devices: Path) -> list[int]:
    """Return the numbers of the NVIDIA GPUs among ``devices``, as CUDA counts them: from 0 on, those in sight only."""
    return list(range(len([device for device in devices.glob("nvidia*") if device.name[6:].isdecimal()])))


def claim(folder: Path, gpus: Iterable[int]) -> int:
    """Lock one of ``gpus`` until this process ends, also through exec, and return it.

    Raises ConfigError when there are none, Unavailable when all are taken.
    """
    gpus = tuple(gpus)
    if not gpus:
        raise ConfigError("no NVIDIA GPU is in sight; is the NVIDIA container toolkit installed?")
    folder.mkdir(parents=True, exist_ok=True)
    for gpu in gpus:
        descriptor = os.open(folder / f"gpu-{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        os.set_inheritable(descriptor, True)
        return gpu
    raise Unavailable(f"all {len(gpus)} GPUs are taken by other workers; run fewer of them")


if __name__ == "__main__":
    main(sys.argv[1:])
