"""In registered mode nothing that comes from the network is unpickled, imported or compiled."""

from __future__ import annotations

import re

import pytest
from tests.support.paths import ROOT
from tests.support.registered_program import run

from telegrad import launch
from telegrad.rpc import Options

LOADS = re.compile(
    r"pickle\.loads?\b|\bUnpickler\b|torch\.load\b|jit\.load\b|import_module\b|\beval\(|\bexec\(|\b__import__\b|marshal|shelve"
)

NOT_REACHED = {
    "wire/payload.py": "the pickling codec, which only a Pipeline without accept='registered' gets",
    "wire/fast_path.py": "an example in its docstring; it is part of the pickling codec",
    "wire/function_names.py": "resolve_function, which the server replaces by its registry",
    "wire/torchscript.py": "called by resolve_function and by the pickling codec",
    "transport/device.py": "opens handles of devices; find_direct_path returns none in registered mode",
    "calls/exceptions.py": "unpickle_exception, which decodes with the pickling codec",
    "rpc/idempotence.py": "an example in its docstring",
    "recovery/files.py": "reads snapshots from a directory of the user; there are none in registered mode",
    "launch/worker_result.py": "reads what a worker sends its own launcher through a pipe",
    "launch/work.py": "reads what the launcher sends its own worker, over a connection that only the two can use",
    "launch/ray/outcome.py": "reads what a worker sends its own driver through Ray",
    "launch/__init__.py": "imports the engines on first use, by names in a table",
    "recovery/randomness.py": "imports NumPy; there are no snapshots in registered mode",
    "observe/__init__.py": "imports the profiler on first use",
    "observe/commands/__init__.py": "imports the commands, by names in a table",
    "doctor/machine_checks.py": "imports telegrad, to see whether that works",
    "__init__.py": "imports the submodules of telegrad on first use, by names in a table",
}
"""Files of src/telegrad that load pickles or code, and why nothing from the network gets there in registered mode."""

OUTSIDE = ("drop_in/", "testing/", "cli.py")
"""Not part of a worker in registered mode: the drop-in refuses the mode, and the others serve no calls."""


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_whole_program_loads_no_pickle_and_no_code(transport: str) -> None:
    options = Options(accept="registered", transports=(transport,))
    used = launch.local(run, workers=2, init_options={"rpc_backend_options": options}, timeout=100)
    assert used == [[], []]


def test_the_places_that_load_pickles_or_code_are_known() -> None:
    source = ROOT / "src" / "telegrad"
    found = set()
    for path in source.rglob("*.py"):
        name = str(path.relative_to(source))
        if not name.startswith(OUTSIDE) and LOADS.search(path.read_text()):
            found.add(name)
    assert found <= set(NOT_REACHED), "say why nothing from the network gets there in registered mode"
    assert set(NOT_REACHED) - {"calls/exceptions.py"} <= found, "these load nothing any more"
