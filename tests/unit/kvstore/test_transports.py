"""Which transports an option stands for, and which of them a pair uses."""

from dataclasses import dataclass

import pytest
import torch

from common.messages import TransportOffer
from kvstore.transports.choices import TransportChoice
from kvstore.transports.lending import Lending, wanted
from kvstore.transports.transport import TransportFailed
from kvstore.transports.transports import GRPC_ONLY, Transports

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Fake:
    """A transport that is its own reader."""

    name: str
    failure: str = ""

    def offer(self) -> bytes:
        return self.name.encode()

    def connect(self, detail: bytes) -> "Fake":
        if self.failure:
            raise TransportFailed(self.failure)
        assert detail == self.offer()
        return self


OTHERWISE = Fake("grpc")


def test_the_first_that_both_have_is_used():
    ours = Transports((Fake("a"), Fake("b"), Fake("c")))
    choice = ours.choose(Transports((Fake("c"), Fake("b"))).offers(), OTHERWISE)
    assert choice.reader.name == "b"
    assert choice.reason == "a: the source does not have it"


def test_without_one_in_common_the_bytes_come_otherwise():
    choice = Transports((Fake("a"),)).choose(GRPC_ONLY.offers(), OTHERWISE)
    assert choice.reader is OTHERWISE
    assert choice.reason == "a: the source does not have it"


def test_one_that_does_not_connect_is_passed_over_and_says_why():
    ours = Transports((Fake("a", "too far"), Fake("b", "too late")))
    choice = ours.choose((TransportOffer("a", b"a"), TransportOffer("b", b"b")), OTHERWISE)
    assert choice.reader is OTHERWISE
    assert choice.reason == "a: too far; b: too late"


def test_grpc_alone_needs_no_reason():
    choice = GRPC_ONLY.choose((TransportOffer("a", b"a"),), OTHERWISE)
    assert (choice.reader, choice.reason) == (OTHERWISE, "")


@pytest.mark.parametrize(
    ("choice", "device", "is_encrypted", "names"),
    [
        ("auto", CPU, False, ("shm",)),
        ("auto", CPU, True, ("shm",)),  # which no network sees
        ("auto", CUDA, False, ("nixl",)),
        ("auto", CUDA, True, ()),
        ("grpc", CPU, False, ()),
        ("grpc", CUDA, False, ()),
        ("shm", CPU, False, ("shm",)),
        ("nixl", CPU, False, ("nixl",)),
        ("nixl", CUDA, True, ("nixl",)),
    ],
)
def test_an_option_stands_for_transports(
    choice: TransportChoice, device: torch.device, is_encrypted: bool, names: tuple[str, ...]
):
    assert wanted(choice, device, is_encrypted) == names


def test_shared_memory_for_a_gpu_is_refused_with_a_reason(caplog: pytest.LogCaptureFixture):
    assert Lending.prepare("shm", CUDA, 4, 64).memory is None
    assert "the transport shm is not used: blocks on cuda are not in host memory" in caplog.text
