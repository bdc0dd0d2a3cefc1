"""tests/ mirrors src/: `tests/<package>/test_<module>.py` tests `src/telegrad/<package>/<module>.py`."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from tests.support.paths import ROOT

SOURCE, TESTS = ROOT / "src" / "telegrad", ROOT / "tests"

NOT_MIRRORED = {"behaviour", "fuzz", "project", "support"}
"""Folders of tests/ without a counterpart: behaviour that crosses modules, fuzzing, the repository itself, helpers."""

TESTED_BY_MODULE = ("protocol", "wire", "calls", "connection", "execution", "backward", "rref", "transport")
"""Packages in which every module of more than `SMALL` lines of code has its own test file."""

SMALL = 60
CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)

NO_COUNTERPART = {
    "transport/test_contract.py": "runs telegrad.testing.check_transport on every transport",
    "test_telegrad.py": "the names that `import telegrad` offers, which live in telegrad/__init__.py",
}
"""Test files without a module of that name, with the reason."""

TESTED_ELSEWHERE = {
    "tests/connection/test_accept.py: a connection in its handshake is one of many": [
        "connection/pending_connection.py"
    ],
    "tests/behaviour/autograd: every pass runs all of them, and they make no sense without torch's engine": [
        "backward/driver.py",
        "backward/effects.py",
        "backward/engine.py",
        "backward/engine_call.py",
        "backward/extension.py",
        "backward/graph.py",
        "backward/handlers.py",
        "backward/incoming.py",
        "backward/inputs.py",
        "backward/island_engine.py",
        "backward/island_runs.py",
        "backward/messaging.py",
        "backward/nodes.py",
        "backward/outgoing.py",
        "backward/pass_run.py",
        "backward/passes.py",
        "backward/reentrant.py",
        "backward/watched_engine.py",
    ],
    "tests/calls/test_client.py, test_server.py and tests/behaviour/calls": [
        "calls/call.py",
        "calls/completion.py",
        "calls/link_reader.py",
        "calls/replier.py",
    ],
    "tests/transport/test_contract.py: the same checks for tcp and unix": [
        "transport/base.py",
        "transport/socket_link.py",
        "transport/socket_writer.py",
        "transport/sockets.py",
    ],
    "tests/wire/test_messages.py": [
        "wire/backward_messages.py",
        "wire/relay_messages.py",
    ],
}
"""Modules without their own test file, by the tests that cover them."""

EXEMPT = {name for names in TESTED_ELSEWHERE.values() for name in names}


def lines_of_code(path: Path) -> int:
    """Return how many lines of a module hold code, without comments, blank lines and docstrings."""
    source = path.read_text()
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    text_lines = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type in CODE} - text_lines)


def test_every_test_file_has_its_module() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS)
        if name.parts[0] in NOT_MIRRORED or str(name) in NO_COUNTERPART:
            continue
        module = SOURCE / name.parent / path.name.removeprefix("test_")
        assert module.exists(), (
            f"tests/{name} tests src/telegrad/{module.relative_to(SOURCE)}, which does not exist. If the module was "
            "renamed or split, rename or split the test file. If the tests cross modules, move them to "
            "tests/behaviour/<topic>/."
        )


def test_every_module_of_the_core_has_its_test_file() -> None:
    for path in sorted(path for package in TESTED_BY_MODULE for path in (SOURCE / package).rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        size = lines_of_code(path)
        if path.name == "__init__.py" or size <= SMALL or name in EXEMPT:
            continue
        test = TESTS / path.relative_to(SOURCE).parent / f"test_{path.name}"
        assert test.exists(), (
            f"src/telegrad/{name} has {size} lines of code and no {test.relative_to(ROOT)}. Move the tests that are "
            "about it there, or write some. If tests elsewhere cover it, say which in TESTED_ELSEWHERE in "
            "tests/project/test_mirror.py."
        )


def test_every_exception_is_still_needed() -> None:
    for name in NO_COUNTERPART:
        path = TESTS / name
        assert path.exists(), f"NO_COUNTERPART names {name}, which does not exist"
        assert not (SOURCE / path.parent.relative_to(TESTS) / path.name.removeprefix("test_")).exists(), name
    for name in EXEMPT:
        path = SOURCE / name
        assert path.exists(), f"TESTED_ELSEWHERE names {name}, which does not exist"
        assert not (TESTS / path.parent.relative_to(SOURCE) / f"test_{path.name}").exists(), f"{name} has its test file"
