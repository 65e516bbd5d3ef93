"""Which role a worker took last."""

from pathlib import Path

from common.ids import WorkerId
from common.messages import Role
from kvstore.host.role_file import RoleFile

A, B = WorkerId("decode-a-1"), WorkerId("decode-b-1")


def test_workers_that_share_a_folder_remember_a_role_each(tmp_path: Path) -> None:
    RoleFile(tmp_path, A).write(Role.PREFILL)
    assert RoleFile(tmp_path, A).read(otherwise=Role.DECODE) is Role.PREFILL
    assert RoleFile(tmp_path, B).read(otherwise=Role.DECODE) is Role.DECODE


def test_a_file_that_makes_no_sense_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / f"{A}.role").write_text("both\n")
    assert RoleFile(tmp_path, A).read(otherwise=Role.DECODE) is Role.DECODE


def test_without_a_folder_and_without_the_right_to_write_nothing_is_remembered(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        RoleFile(folder, A).write(Role.PREFILL)
        assert RoleFile(folder, A).read(otherwise=Role.DECODE) is Role.DECODE
