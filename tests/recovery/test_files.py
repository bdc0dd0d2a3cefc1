"""Snapshots on disk are complete or refused, and touch nothing else in their directory."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from telegrad.errors import RecoveryFailed
from telegrad.recovery import files


def test_what_was_written_can_be_read(tmp_path: Path) -> None:
    folder = files.folder_of(tmp_path, 3, "ab12")
    files.write(folder, "b", ({"x": torch.ones(2)}, [1, 2.5, "y"], OrderedDict(z=None)))
    items, plain, ordered = files.read(folder, "b")
    assert torch.equal(items["x"], torch.ones(2))
    assert (plain, ordered) == ([1, 2.5, "y"], {"z": None})
    assert files.read(folder, "c") is None
    assert os.listdir(folder) == ["b.pt"]


class Subclass(torch.Tensor):
    """A tensor of a class that torch does not know."""


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), np.float32(1), Path("x"), lambda: 0, torch.ones(2).as_subclass(Subclass)],
    ids=["array", "NumPy's number", "path", "function", "tensor of another class"],
)
def test_what_could_not_be_read_back_is_refused_when_it_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(RecoveryFailed, match="the snapshot of worker 'b' contains what cannot be read back from disk"):
        files.write(tmp_path, "b", {"state": [torch.ones(2), value]})
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r": real(Path("/dev/full"), mode))
    with pytest.raises(RecoveryFailed) as caught:
        files.write(tmp_path, "b", {"x": torch.ones(100_000)})
    assert f"worker 'b' cannot write its snapshot to {tmp_path}/b.pt: [Errno 28] No space left" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_named_if_torch_raises_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(share: object, file: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(files, "_check_readable", lambda worker, share: None)
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RecoveryFailed, match=r"worker 'b' cannot write its snapshot to .*: \[Errno 28\] No space left"):
        files.write(tmp_path, "b", {})


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    files.write(tmp_path, "b", {"x": torch.ones(2)})
    path = tmp_path / "b.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecoveryFailed, match=f"worker 'b' cannot read its snapshot from {re.escape(str(path))}"):
        files.read(tmp_path, "b")


def test_a_file_with_one_wrong_bit_is_refused(tmp_path: Path) -> None:
    files.write(tmp_path, "b", {"x": torch.arange(10_000)})
    path = tmp_path / "b.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    with pytest.raises(RecoveryFailed, match=r"worker 'b' cannot read its snapshot .*: it is damaged \(.*/data/0 has"):
        files.read(tmp_path, "b")


def test_a_commit_removes_older_snapshots_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "notes.txt").touch()
    for number, run in [(1, "aa"), (2, "aa"), (2, "bb"), (3, "aa")]:
        files.write(files.folder_of(tmp_path, number, run), "b", {})
    files.commit(tmp_path, files.Latest(2, 20, "bb"), ["b"])
    assert files.latest(tmp_path) == files.Latest(2, 20, "bb")
    assert sorted(os.listdir(tmp_path)) == [
        *("1", "latest.json", "notes.txt", "snapshot-2-aa", "snapshot-2-bb", "snapshot-3-aa")
    ]


def test_a_commit_after_that_of_another_run_is_refused(tmp_path: Path) -> None:
    for number, run in [(4, "aa"), (5, "bb"), (6, "aa"), (7, "aa")]:
        files.write(files.folder_of(tmp_path, number, run), "b", {})
    begun, other = files.Latest(4, 40, "aa"), files.Latest(5, 50, "bb")
    files.commit(tmp_path, begun, ["b"])
    files.commit(tmp_path, other, ["b"], begun)
    with pytest.raises(RecoveryFailed, match=r"another training has written snapshot 5 to .*: pass each training a d"):
        files.commit(tmp_path, files.Latest(6, 60, "aa"), ["b"], begun)
    assert files.latest(tmp_path) == other
    assert files.read(other.folder(tmp_path), "b") == {}
    files.commit(tmp_path, files.Latest(7, 70, "aa"), ["b"], other)


def test_a_directory_that_cannot_be_listed_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new = files.Latest(2, 20, "aa")
    files.write(new.folder(tmp_path), "b", {})
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    files.commit(tmp_path, new, ["b"])
    assert files.latest(tmp_path) == new
    assert "before number 2 cannot be removed: [Errno 5] Input/output error" in caplog.text


def test_what_the_system_refuses_to_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "b.pt").mkdir()
    with pytest.raises(RecoveryFailed, match=r"worker 'b' cannot read .*Is a directory: .*\. Check the disk and"):
        files.read(tmp_path, "b")
    (tmp_path / files.LATEST).mkdir()
    with pytest.raises(RecoveryFailed, match=r"latest\.json, which names the last snapshot, cannot be read: .*Check"):
        files.latest(tmp_path)
    (tmp_path / files.LATEST).rmdir()
    files.folder_of(tmp_path, 1, "aa").touch()
    with pytest.raises(RecoveryFailed, match=r"cannot be completed: .*Not a directory: .*\. Make room or check"):
        files.commit(tmp_path, files.Latest(1, 0, "aa"), ["b"])


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RecoveryFailed, match=f"the directory {path} for snapshots cannot be created"):
            files.create(path)


def test_a_share_that_the_driver_does_not_see_is_no_complete_snapshot(tmp_path: Path) -> None:
    files.write(files.folder_of(tmp_path, 1, "aa"), "a", {})
    with pytest.raises(RecoveryFailed, match=r"worker 'b' has written .* must be on a file system that all workers"):
        files.commit(tmp_path, files.Latest(1, 0, "aa"), ["a", "b"])
    assert files.latest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"number": 3}'])
def test_the_directory_of_another_program_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / files.LATEST).write_bytes(content)
    with pytest.raises(RecoveryFailed, match=r"latest\.json does not name a snapshot .* that nothing else uses"):
        files.latest(tmp_path)
