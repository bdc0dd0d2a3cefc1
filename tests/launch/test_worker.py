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
