"""A file system without room, for tests of what happens then."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_file_system(mount: Path) -> Iterator[Path]:
    """Mount a file system in which no file can be created, and one of 4 KB named ``file`` exists.

    The test is skipped if this user cannot mount.
    """
    mount.mkdir(mode=0o700)
    options = "size=4k,nr_inodes=2,mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this user cannot mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        (mount / "file").write_bytes(bytes(4096))
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
