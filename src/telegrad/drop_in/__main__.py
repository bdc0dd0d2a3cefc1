"""``python -m telegrad.drop_in script.py args...``: run a program that knows nothing of telegrad, with the drop-in.

The program is started anew in place of this process, so it finds everything as if it had been started by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

from telegrad.drop_in.children import environment

_USAGE = """\
usage: python -m telegrad.drop_in SCRIPT [ARGUMENT ...]
       python -m telegrad.drop_in -m MODULE [ARGUMENT ...]
       python -m telegrad.drop_in -c COMMAND [ARGUMENT ...]

Run a Python program in which torch.distributed.rpc and its kin are telegrad's.
"""


def main(arguments: list[str]) -> int:
    """Become the program that the arguments name."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if not arguments or arguments in (["-m"], ["-c"]):
        sys.stderr.write(_USAGE)
        return 2
    os.environ.update(environment())
    # -W, -X and the like go on to the program, as multiprocessing does it.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private, but for this
    return os.execv(sys.executable, [sys.executable, *flags, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
