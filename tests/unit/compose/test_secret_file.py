"""The cluster's secret in a file."""

from pathlib import Path

from compose.secret_file import make_secret


def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_secret(path)
    secret = path.read_text()
    assert len(secret.strip()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    make_secret(path)
    assert path.read_text() == secret
    assert list(tmp_path.iterdir()) == [path]
