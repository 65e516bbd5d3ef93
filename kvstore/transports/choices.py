"""The option ``--transport``. Loads nothing, so that every command line may have it."""

from typing import Literal

TransportChoice = Literal["auto", "grpc", "shm", "nixl"]
