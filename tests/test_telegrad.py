"""The package itself: light to import, and complete."""

from __future__ import annotations

import subprocess
import sys

import telegrad


def test_importing_the_package_does_not_load_torch() -> None:
    program = "import sys, telegrad; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_submodules_are_available_without_importing_them() -> None:
    program = "import telegrad; print(telegrad.errors.WorkerLost.__name__, telegrad.rpc.session.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "WorkerLost session\n"


def test_every_public_name_exists() -> None:
    for name in telegrad.__all__:
        assert getattr(telegrad, name) is not None


def test_dir_lists_every_public_name_and_submodule_without_loading_torch() -> None:
    program = "import sys, telegrad; print(*dir(telegrad)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    assert {*telegrad.__all__, "autograd", "nn", "optim", "rpc", "errors", "launch"} <= set(names.split())
    assert loaded == "False"
