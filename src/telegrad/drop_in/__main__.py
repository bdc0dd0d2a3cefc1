"""``python -m telegrad.drop_in script.py args...``: run an unmodified program with the drop-in.

The program replaces this process (exec), so it finds the environment of a program that was started directly.
"""

from __future__ import annotations

import os
import subprocess
import sys

from telegrad.drop_in.subprocesses import environment

_USAGE = """\
usage: python -m telegrad.drop_in SCRIPT [ARGUMENT ...]
       python -m telegrad.drop_in -m MODULE [ARGUMENT ...]
       python -m telegrad.drop_in -c COMMAND [ARGUMENT ...]

Run a Python program with torch.distributed.rpc and related modules replaced by telegrad.
"""


def main(arguments: list[str]) -> int:
    """Replace this process by the program that the arguments name."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if not arguments or arguments in (["-m"], ["-c"]):
        sys.stderr.write(_USAGE)
        return 2
    os.environ.update(environment())
    # Pass -W, -X and similar flags on to the program, as multiprocessing does.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private, but made for this
    return os.execv(sys.executable, [sys.executable, *flags, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
