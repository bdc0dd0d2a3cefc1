from __future__ import annotations

import os

import pytest

from telegrad.launch.worker import Worker


class Exited(Worker):
    def __init__(self, code: int) -> None:
        super().__init__("a", 0, os.getpid(), -1, {})
        self.exitcode = code

    def read_exitcode(self) -> int:
        raise AssertionError("it has exited already")


@pytest.mark.parametrize(
    ("code", "what"),
    [(3, "failed with exit code 3"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_the_end_of_a_worker_is_described(code: int, what: str) -> None:
    worker = Exited(code)
    assert worker.failed()
    assert worker.describe_exit() == what


def test_exit_code_0_is_not_a_failure() -> None:
    assert not Exited(0).failed()


def test_a_forked_child_does_not_keep_the_lifeline_of_a_worker() -> None:
    class Living(Exited):
        def __init__(self, lifeline: int) -> None:
            Worker.__init__(self, "a", 0, os.getpid(), os.dup(lifeline), {}, lifeline)

    read_end, write_end = os.pipe()
    worker = Living(write_end)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(write_end)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)
