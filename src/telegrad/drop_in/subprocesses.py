"""Installs the drop-in in the Python programs that this process starts.

A forked child inherits it in memory. Any other child finds the directory ``autoload`` first on its PYTHONPATH. It holds
a ``sitecustomize`` module, which Python imports at startup. The module waits until the program imports torch and then
installs the drop-in. It also runs the ``sitecustomize`` that Python would have found without it. So nothing needs to be
written into site-packages, and a child that does not use torch pays nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

AUTOLOAD = str(Path(__file__).parent / "autoload")
"""The directory of telegrad's ``sitecustomize``."""


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that start a Python program with the drop-in."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if AUTOLOAD not in paths:
        # The child must also find telegrad itself: its sys.path may differ from this process's.
        home = str(Path(__file__).parents[2])
        paths = [AUTOLOAD, *paths] if home in paths or _is_installed_at(home) else [AUTOLOAD, *paths, home]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _is_installed_at(home: str) -> bool:
    return Path(home).name in ("site-packages", "dist-packages")


def install_in_subprocesses(environ: MutableMapping[str, str] = os.environ) -> None:
    """Install the drop-in in every Python program that this process starts from now on."""
    environ.update(environment(environ))
