"""The directory of unix sockets belongs to this user alone, and so does the way to it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.full_file_system import full_file_system

from telegrad.bootstrap import start_agent
from telegrad.errors import TelegradError
from telegrad.options import Options
from telegrad.transport.runtime_directory import explain, runtime_directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def use(path: Path) -> Path:
    return runtime_directory({"TELEGRAD_RUNTIME_DIR": str(path)})


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_runtime_directory_is_created_private(tmp_path: Path, no_umask: None) -> None:
    directory = use(tmp_path / "a" / "b")
    assert directory == tmp_path / "a" / "b"
    assert mode_of(directory) == mode_of(directory.parent) == 0o700
    assert use(directory) == directory


def test_xdg_runtime_dir_is_used_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "telegrad"
    fallback = tmp_path / f"telegrad-{os.geteuid()}"
    assert runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == fallback
    assert runtime_directory({}) == fallback
    assert mode_of(fallback) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_can_write_to_is_rejected(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(TelegradError, match=f"chmod 700 {tmp_path}"):
        use(tmp_path)


def test_a_directory_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TelegradError, match=f"belongs to user id {owner}.*TELEGRAD_RUNTIME_DIR"):
        use(tmp_path)


def test_a_symbolic_link_in_place_of_the_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(TelegradError, match="is not a directory but a symbolic link"):
            use(tmp_path / name)


def test_a_file_in_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TelegradError, match=r"cannot create the directory .*; set TELEGRAD_RUNTIME_DIR"):
            use(path)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_world_writable_parent_without_the_sticky_bit_is_rejected(tmp_path: Path, depth: int) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    directory = parent.joinpath(*["inner"] * depth)
    with pytest.raises(TelegradError, match=rf"every user can replace what is in {parent} \(mode 0777\).*chmod \+t"):
        use(directory)
    parent.chmod(0o1777)
    assert use(directory) == directory


def test_a_world_writable_parent_behind_a_symbolic_link_is_rejected(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    (parent / "inner").mkdir(parents=True)
    parent.chmod(0o777)
    (tmp_path / "link").symlink_to(parent / "inner")
    with pytest.raises(TelegradError, match=f"every user can replace what is in {parent} "):
        use(tmp_path / "link" / "directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_parent_that_is_a_link_of_another_user_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert use(tmp_path / "link" / "directory").parent == tmp_path / "link"
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    with pytest.raises(TelegradError, match="is a symbolic link of user id 12345"):
        use(tmp_path / "link" / "directory")


# -- no space ---------------------------------------------------------------------------------------------------


def test_a_full_file_system_is_explained_with_a_remedy() -> None:
    for number, words in (
        (errno.ENOSPC, "no space is left in /run"),
        (errno.EDQUOT, "quota of this user is used up in /run"),
    ):
        text = explain(OSError(number, os.strerror(number)), "/run")
        assert words in text
        assert "set TELEGRAD_RUNTIME_DIR to another file system" in text
    assert explain(OSError(errno.EROFS, "Read-only file system"), "/run").startswith("/run: Read-only file system; set")


@pytest.fixture
def full_directory(tmp_path: Path) -> Iterator[Path]:
    with full_file_system(tmp_path / "full") as directory:
        yield directory


def test_a_runtime_directory_on_a_full_file_system_is_a_sentence(full_directory: Path) -> None:
    with pytest.raises(TelegradError, match=rf"cannot create .*no space is left in {full_directory}/new; remove files"):
        use(full_directory / "new")


def test_a_worker_whose_socket_does_not_fit_says_so(full_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", str(full_directory))
    with pytest.raises(
        TelegradError, match=f"'a' cannot create its unix socket: no space is left in {full_directory};"
    ):
        start_agent("a", 0, lambda me, listen: [me], Options())
