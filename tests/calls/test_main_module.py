"""Functions and globals of ``__main__`` that a worker has not defined yet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.loaded_interpreter import LoadedPython

SCRIPT = """\
import os, threading, telegrad
go = threading.Event()
def release():
    go.set()
def early():
    return value
telegrad.init_rpc()
late = os.environ["RANK"] == "1"
if late:
    go.wait(60)  # for the other worker, which is ahead
{definition}
try:
    if not late:
        {calls}
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", ()))
if not late:
    telegrad.rpc_sync("worker1", release)
telegrad.shutdown()
"""


def run_two(tmp_path: Path, definition: str, calls: str) -> str:
    """Run the script as two workers, of which worker 1 is behind, and return what worker 0 prints."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(definition=definition, calls=calls))
    common = {"WORLD_SIZE": "2", "TELEGRAD_RUNTIME_DIR": str(tmp_path)}
    common["TELEGRAD_INIT_METHOD"] = f"file://{tmp_path}/store"
    workers = [
        LoadedPython(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**common, "RANK": rank}, cwd=tmp_path
        )
        for rank in "01"
    ]
    try:
        said = [worker.communicate(timeout=60)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
        return str(said[0]).strip()
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                worker.wait()


def test_a_call_waits_until_the_script_of_the_callee_has_defined_the_function(tmp_path: Path) -> None:
    definition = "value = 3\ndef tripled(x):\n    return value * x\n"
    calls = "call = telegrad.rpc_async('worker1', tripled, (14,)); telegrad.rpc_sync('worker1', release)"
    calls += "; print(call.wait())"
    assert run_two(tmp_path, definition, calls) == "42"


def test_a_function_that_the_script_of_the_callee_never_defines_is_an_error_at_once(tmp_path: Path) -> None:
    definition = "if not late:\n    def only_here():\n        return 1\n"
    calls = "call = telegrad.rpc_async('worker1', only_here); telegrad.rpc_sync('worker1', release); call.wait()"
    said = run_two(tmp_path, definition, calls)
    assert said.startswith("FunctionNotFound")
    assert "the script of worker 'worker1' does not define 'only_here' yet: it has ended or waits in shutdown()" in said
    assert "before init_rpc()" in said


def test_a_global_that_the_script_has_not_defined_yet_is_explained(tmp_path: Path) -> None:
    said = run_two(tmp_path, "value = 3", "telegrad.rpc_sync('worker1', early)")
    assert said.startswith("NameError name 'value' is not defined")
    # line 10, unless the call came while the main thread was still on its way there from init_rpc()
    where = r"the script of worker 'worker1' is at script\.py:(7|8|9|10) and has not defined 'value' yet"
    assert re.search(where, said), said
