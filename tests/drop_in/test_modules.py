"""`install` replaces torch's modules by telegrad's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import SOURCES


def run(program: str, folder: Path | None = None) -> str:
    """Return the output of the program. With a folder it is run from a file, whose source TorchScript can read."""
    start = ["-c", program]
    if folder is not None:
        (folder / "program.py").write_text(program)
        start = [str(folder / "program.py")]
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", *start],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_telegrad_changes_nothing() -> None:
    program = """
import torch, torch.distributed.rpc as rpc, torch.distributed.autograd
before = dict(vars(torch.distributed)), rpc.rpc_sync, torch.futures.wait_all
import telegrad.rpc, telegrad.autograd, telegrad.drop_in, telegrad.drop_in.rpc
assert (dict(vars(torch.distributed)), rpc.rpc_sync, torch.futures.wait_all) == before
assert not telegrad.drop_in.installed()
"""
    run(program)


def test_install_replaces_the_modules_and_their_names() -> None:
    program = """
import sys
import telegrad.drop_in
telegrad.drop_in.install()
telegrad.drop_in.install()
assert "torch.distributed.optim" not in sys.modules  # it takes a second to load
import os
from telegrad.drop_in.subprocesses import AUTOLOAD
assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == AUTOLOAD  # so that children have it too
assert telegrad.drop_in.installed()
import torch
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api, torch.distributed.rpc.functions, torch.distributed.rpc.backend_registry
import torch.distributed.rpc.constants, torch.distributed.rpc.options, torch.distributed.rpc.internal
import torch.distributed.autograd as dist_autograd
from torch.distributed.optim import DistributedOptimizer
import torch.distributed.optim.optimizer
from torch.distributed.nn import RemoteModule
import torch.distributed.nn.api.remote_module
from torch._jit_internal import RRef
assert rpc is torch.distributed.rpc and rpc.is_available() and dist_autograd.is_available()
assert RRef is rpc.RRef
for thing in (rpc.rpc_sync, rpc.api.rpc_async, rpc.functions.async_execution, rpc.RRef, dist_autograd.context,
              rpc.BackendType.TENSORPIPE.value.init_backend_handler, rpc.internal._internal_rpc_pickler,
              rpc.TensorPipeRpcBackendOptions, DistributedOptimizer,
              torch.distributed.optim.optimizer.DistributedOptimizer,
              RemoteModule, torch.distributed.nn.api.remote_module.RemoteModule):
    assert (thing.__module__).startswith("telegrad."), thing
assert rpc.constants.UNSET_RPC_TIMEOUT == -1.0 and rpc.constants.DEFAULT_RPC_TIMEOUT_SEC == 60.0
assert repr(rpc.BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
"""
    run(program)


def test_backend_type_is_current_after_a_registration() -> None:
    program = """
import telegrad.drop_in
telegrad.drop_in.install()
import sys
import torch.distributed.rpc as rpc
assert "torch.distributed.rpc._testing" not in sys.modules
assert [backend.name for backend in rpc.BackendType] == ["TENSORPIPE"]
import torch.distributed.rpc._testing
assert isinstance(rpc.BackendType.TENSORPIPE, rpc.backend_registry.BackendType)
assert "BackendType" in dir(rpc) and rpc.BackendType.FAULTY_TENSORPIPE
from torch._C._distributed_rpc_testing import FaultyTensorPipeAgent
assert rpc._testing.FaultyTensorPipeAgent is FaultyTensorPipeAgent
"""
    run(program)


def test_install_replaces_the_c_modules() -> None:
    program = """
import torch
from torch._C._distributed_rpc import PyRRef as theirs
import telegrad.drop_in
assert torch._C._distributed_rpc.PyRRef is theirs
telegrad.drop_in.install()
import torch._C._distributed_autograd
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
assert PyRRef is rpc.PyRRef is torch._C._distributed_rpc.PyRRef is not theirs
assert torch._C._distributed_autograd.get_gradients is torch.distributed.autograd.get_gradients
options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0")
assert not _is_current_rpc_agent_set()
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert _is_current_rpc_agent_set()
assert isinstance(rpc.RRef(1), PyRRef) and isinstance(rpc.remote("alone", int), PyRRef)
assert type(rpc.RRef(1)) is not PyRRef
rpc.shutdown()
assert not _is_current_rpc_agent_set()
"""
    run(program)


def test_a_package_that_was_loaded_earlier_gets_the_replacement() -> None:
    program = """
import torch.distributed.optim, torch.distributed.nn
assert torch.distributed.optim.DistributedOptimizer.__module__.startswith("torch.")
import telegrad.drop_in
telegrad.drop_in.install()
assert torch.distributed.optim.DistributedOptimizer.__module__.startswith("telegrad.")
assert torch.distributed.nn.RemoteModule.__module__.startswith("telegrad.")
assert torch.distributed.optim.optimizer.DistributedOptimizer is torch.distributed.optim.DistributedOptimizer
"""
    run(program)


# Takes RPC out of torch the moment that torch looks whether it has it.
WITHOUT_RPC = """
import sys

class Forget:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.rpc":
            sys.meta_path.remove(self)
            for function in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                delattr(sys.modules["torch._C"], function)

sys.meta_path.insert(0, Forget())
"""


def test_torch_may_have_been_built_without_rpc(tmp_path: Path) -> None:
    program = (
        WITHOUT_RPC
        + """
import torch, warnings
import torch.distributed.rpc as theirs
assert not theirs.is_available() and not hasattr(theirs, "rpc_sync")
import telegrad.drop_in
telegrad.drop_in.install()
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, init_rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.nn import RemoteModule
from torch.nn.parallel import DistributedDataParallel
warnings.simplefilter("ignore")

@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0")
init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("alone", double, (torch.ones(1),)).item() == 2
with torch.distributed.autograd.context() as context:
    x = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync("alone", torch.mul, (x, 3))
    torch.distributed.autograd.backward(context, [y.sum()])
    print(torch.distributed.autograd.get_gradients(context)[x].tolist())
rpc.shutdown()
"""
    )
    assert run(program, tmp_path) == "[3.0, 3.0]\n"
