"""From the host to the model's device without waiting for what the device is busy with."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; later work on the current stream finds it there.

    To a GPU it is copied from pinned memory, which torch keeps from others until the copy is made. From other memory
    the call would return when all that was launched before has ended.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
