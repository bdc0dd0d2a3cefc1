"""Private names of torch are used in the modules `torch_private*` only; a missing one is reported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import SOURCES

PACKAGE = Path(SOURCES, "telegrad")
FILES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if not (path.parent == PACKAGE and path.name.startswith("torch_private"))
    and PACKAGE / "drop_in" not in path.parents  # drop_in replaces such names
)
OF_OBJECTS = {
    *(name for owner in (torch.Tensor, torch._C._FunctionBase) for name in dir(owner)),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_metadata_cache", "_ragged_idx", "_untyped_storage"),
}
"""Private attributes of tensors, nodes and optimizers."""
OF_MODULES = {("nn/remote_ops.py", "_version")}
"""Names that tensors have, too, but that are read from an nn.Module, whose subclasses may use them."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(code: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name of torch in a source text."""
    tree = ast.parse(code)
    from_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            from_torch.update(alias.asname or alias.name for alias in node.names)
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if is_private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch" and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            owner = root.id if isinstance(root, ast.Name) else ""
            if owner in from_torch or (node.attr in OF_OBJECTS and owner not in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name in OF_OBJECTS:
                yield node.lineno, str(name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_uses_private_names_of_torch(path: Path) -> None:
    found = private_names(path.read_text())
    where = str(path.relative_to(PACKAGE))
    assert [(line, name) for line, name in found if (where, name) not in OF_MODULES] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._autograd",
        "import torch._dynamo",
        "from torch import _C",
        "from torch._C import Future",
        "from torch.autograd import Variable\nVariable._execution_engine",
        "def f(x):\n    return x._base",
        "def f(x):\n    return getattr(x, '_backward_hooks')",
    ],
)
def test_private_names_of_torch_are_found(code: str) -> None:
    assert list(private_names(code))


def test_a_torch_that_lacks_a_private_name_is_reported_at_import() -> None:
    code = "import torch; del torch._C._storage_Use_Count; import telegrad.torch_private"
    done = run_loaded([sys.executable, "-c", code], timeout=120)
    assert done.returncode != 0
    assert f"ImportError: torch {torch.__version__} lacks torch._C._storage_Use_Count" in done.stderr
