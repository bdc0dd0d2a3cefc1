"""Source trees of telegrad to compare: a directory as it is, or a git revision, which is extracted."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from pairs import BenchmarkError

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "telegrad", "__init__.py")


@dataclass(frozen=True)
class Tree:
    """A source tree."""

    label: str
    """What the user called it, and for a revision its commit."""
    sources: Path
    """The folder that contains the package."""


def open_tree(name: str, folder: Path, repository: Path = ROOT) -> Tree:
    """Return the tree of a directory or a git revision. A revision is extracted to `folder`: nothing else changes."""
    directory = Path(name)
    if (directory / PACKAGE).is_file():
        return Tree(name, (directory / "src").resolve())
    if directory.is_dir():
        raise BenchmarkError(f"the directory {name!r} is no tree of telegrad: it has no {PACKAGE}")
    commit = _commit(name, repository)
    folder.mkdir(parents=True)
    archive = _git(repository, "archive", "--format=tar", commit, "src")
    if archive.returncode != 0:
        raise BenchmarkError(f"revision {name!r} has no folder src: {_said(archive)}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    if not (folder / PACKAGE).is_file():
        raise BenchmarkError(f"revision {name!r} is no tree of telegrad: it has no {PACKAGE}")
    return Tree(name if commit.startswith(name) else f"{name} ({commit[:8]})", folder / "src")


def _commit(name: str, repository: Path) -> str:
    if name.startswith("-"):
        raise BenchmarkError(f"{name!r} is neither a directory nor a git revision")
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found.returncode != 0:
        said = _said(found)
        raise BenchmarkError(
            f"{name!r} is neither a directory nor a git revision of {repository}{f': {said}' if said else ''}"
        )
    return found.stdout.decode().strip()


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        raise BenchmarkError("git is not installed: name directories, not revisions") from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip()
