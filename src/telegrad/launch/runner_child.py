"""The worker of a runner: does the work that its environment names, and writes the result to a pipe."""

from __future__ import annotations

import os
import sys

from telegrad.launch import worker_result
from telegrad.launch.runner import INIT_VARIABLE, RESULT_VARIABLE, WORK_VARIABLE
from telegrad.launch.work import run_work, without_frames_of


def main() -> None:
    """Do the work, and end the process."""
    pipe, work_file = int(os.environ.pop(RESULT_VARIABLE)), int(os.environ.pop(WORK_VARIABLE))
    init = os.environ.pop(INIT_VARIABLE, "1") == "1"
    os.set_inheritable(pipe, False)
    with os.fdopen(work_file, "rb") as file:
        file.seek(0)
        work = file.read()
    code = 0
    try:
        value = run_work(work, os.environ["TELEGRAD_NAME"], init=init)
        _flush()
        worker_result.write_value(pipe, value)
    except BaseException as error:  # noqa: BLE001 - sent to the launcher
        _flush()
        worker_result.write_error(pipe, without_frames_of(error, [__file__]))
        code = 1
    _flush()
    # As in a worker of `launch.local`, functions registered with atexit are not called: threads may still run.
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
