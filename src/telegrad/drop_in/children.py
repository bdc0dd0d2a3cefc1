"""Hands the drop-in on to the Python programs that this process starts.

A forked child has it in its memory. Any other finds, first on its PYTHONPATH, a folder with a ``sitecustomize`` module,
which Python imports at every start. That one waits until the program imports torch, and then installs the drop-in. It
also runs the ``sitecustomize`` that would have been found without it. So nothing needs to be written into
site-packages, and a child that does not use torch pays nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

START = str(Path(__file__).parent / "start")
"""The folder that holds our ``sitecustomize``."""


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a Python program starts with the drop-in."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if START not in paths:
        # Telegrad itself must be found there too: a child may have another sys.path than this process.
        home = str(Path(__file__).parents[2])
        paths = [START, *paths] if home in paths or _is_installed_at(home) else [START, *paths, home]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _is_installed_at(home: str) -> bool:
    return Path(home).name in ("site-packages", "dist-packages")


def inherit(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let every Python program that this process starts from now on have the drop-in."""
    environ.update(environment(environ))
