"""Mutual TLS between processes."""

from pathlib import Path

import pytest
import trustme

from common.errors import ConfigError, Unavailable
from common.ids import Epoch, WorkerId
from common.messages import Hello, HelloReply
from common.rpc import Handlers, RpcClient, RpcServer
from common.services import HELLO
from common.tls import Tls, check_tls, load_tls
from tests.support.reference import Reference
from tests.support.split import split
from tests.support.stub_decode import FINGERPRINT
from tests.support.tiny_models import build

pytestmark = pytest.mark.anyio

HELLO_MESSAGE = Hello(WorkerId("caller"), Epoch(1), FINGERPRINT)


def files(authority: trustme.CA, folder: Path) -> tuple[str, str, str]:
    """Write a certificate for loopback with its key, and the authority; return their paths."""
    folder.mkdir()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key, root = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(root)
    return str(certificate), str(key), str(root)


def identity(authority: trustme.CA, folder: Path) -> Tls:
    tls = load_tls(*files(authority, folder))
    assert tls is not None
    return tls


async def hello(message: Hello) -> HelloReply:
    return HelloReply(WorkerId("server"), Epoch(2), message.fingerprint)


async def test_only_a_certificate_of_the_clusters_authority_is_served(tmp_path: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    server = RpcServer("127.0.0.1", 0, Handlers({HELLO: hello}, {}, {}), "token", identity(ours, tmp_path / "server"))
    await server.start()
    try:
        for tls, is_served in (
            (identity(ours, tmp_path / "ours"), True),
            (identity(theirs, tmp_path / "theirs"), False),
            (None, False),
        ):
            client = RpcClient(server.address, "token", tls)
            try:
                if is_served:
                    assert (await client.call(HELLO, HELLO_MESSAGE, 5.0)).epoch == 2
                else:
                    with pytest.raises(Unavailable):
                        await client.call(HELLO, HELLO_MESSAGE, 5.0)
            finally:
                await client.close()
    finally:
        await server.stop(0)


async def test_a_prompt_is_handed_over_under_tls(tmp_path: Path, redis_url: str) -> None:
    build("llama", tmp_path / "model")
    certificate, key, root = files(trustme.CA(), tmp_path / "tls")
    tokens = list(range(3, 100))
    async with split(str(tmp_path / "model"), redis_url, tls_cert=certificate, tls_key=key, tls_ca=root) as cluster:
        answer = await cluster.generate(tokens)
        assert answer.token_ids == await Reference(tmp_path / "model").greedy_aside(tokens, 8)
        assert cluster.decode.counters()["pulled_tokens"] > 0


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        check_tls("cert", "", "")
    with pytest.raises(ConfigError, match=r"--tls-cert /nowhere cannot be read"):
        load_tls("/nowhere", "/nowhere", "/nowhere")
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match="is not a PEM file"):
        load_tls(*[str(tmp_path / "text")] * 3)
