"""Unmodified programs written for torch.distributed.rpc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.drop_in_programs import run_workers
from tests.support.paths import SOURCES

TRAINING = """
import os
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions

class Server:
    def __init__(self):
        self.weight = torch.full((2,), 3.0, requires_grad=True)

    def forward(self, x):
        return x * self.weight

    def gradient(self, context):
        return dist_autograd.get_gradients(context)[self.weight]

    @rpc.functions.async_execution
    def later(self, to, x):
        return rpc.rpc_async(to, torch.add, (x, 1)).then(lambda future: future.wait() * 2)

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType.TENSORPIPE, rank=rank, world_size=2,
             rpc_backend_options=TensorPipeRpcBackendOptions(num_worker_threads=4, _transports=["uv"]))
if rank == 0:
    server = rpc.remote("worker1", Server)
    with dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        loss = server.rpc_sync().forward(x).sum()
        dist_autograd.backward(context, [loss])
        print("here", dist_autograd.get_gradients(context)[x].tolist())
        print("there", server.rpc_sync().gradient(context).tolist())
    with torch.autocast("cpu", torch.bfloat16):  # which torch's calls do not carry
        print("there", rpc.rpc_sync("worker1", torch.mm, (torch.ones(2, 2), torch.ones(2, 2))).dtype)
    print("later", server.rpc_async().later("worker0", torch.ones(1)).wait().item())
    assert server.owner() == rpc.get_worker_info("worker1") and not server.is_owner()
rpc.shutdown()
"""


def test_a_training_program_runs_unchanged(tmp_path: Path) -> None:
    assert run_workers(TRAINING, tmp_path) == [
        "here [3.0, 3.0]",
        "later 4.0",
        "there [1.0, 1.0]",
        "there torch.float32",
    ]


# Each of these lines is a difference that docs/migrating.md names; tests/drop_in/rpc/test_options.py has the last.
DIFFERENCES = """
import os, torch, warnings
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc.api import _all_gather

def view(x):
    return x.stride(), x.untyped_storage().nbytes()

def two(x):
    return x * 2, x * 3

def passed_on(x):
    return x

def lookup():
    return {}["missing"]

def leave():
    os._exit(1)

warnings.simplefilter("ignore", DeprecationWarning)  # torch has deprecated TorchScript

@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.jit.script
def call_from_script(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, double, (x,))

rank = int(os.environ["RANK"])
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.environ["STORE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    print("scripted:", rpc.rpc_sync("worker1", double, (torch.ones(1),)).item())
    try:
        call_from_script("worker1", torch.ones(1))
    except RuntimeError:
        print("no calls from TorchScript")
    with torch.autograd.profiler.profile() as profile:
        rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
    names = [event.name for event in profile.function_events]
    print("profiler:", *sorted(name for name in names if name.startswith("rpc_") and name.endswith((")", "::add"))))
    print("a view", rpc.rpc_sync("worker1", view, (torch.ones(100, 100)[:, :2],)))
    x = torch.ones(1, requires_grad=True)
    with dist_autograd.context() as context:
        used, unused = rpc.rpc_sync("worker1", two, (x,))
        dist_autograd.backward(context, [used.sum()])
        print("unused", dist_autograd.get_gradients(context)[x].item())
    with dist_autograd.context() as context:
        with torch.no_grad():
            same = rpc.rpc_sync("worker1", passed_on, (x,))
        dist_autograd.backward(context, [same.sum()])
        print("under no_grad", dist_autograd.get_gradients(context)[x].item())
    for call in (lookup, lambda: {}["missing"]):
        try:
            rpc.rpc_sync("worker1", call)
        except KeyError:
            print("KeyError keeps its type")
    try:
        rpc.rpc_sync("worker1", leave)
    except RuntimeError as error:
        print(type(error).__name__)
    try:
        _all_gather(1)
    except RuntimeError as error:
        print("all_gather:", "'worker1' is lost" in str(error))
    rpc.shutdown(graceful=False)
else:
    rpc.shutdown()
"""


def test_the_differences_in_the_documentation_are_true(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(DIFFERENCES)
    environ = {"PYTHONPATH": SOURCES, "STORE": str(tmp_path / "store")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "telegrad.drop_in", str(script)],
            env={**os.environ, **environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=110) for worker in workers]
    assert workers[0].returncode == 0, outputs[0][1]
    assert outputs[0][0].splitlines() == [
        "scripted: 2.0",
        "no calls from TorchScript",
        "profiler: rpc_sync#aten::add(worker0 -> worker1) rpc_sync#aten::add(worker0 -> worker1)#remote_op: aten::add",
        "a view ((2, 1), 800)",
        "unused 2.0",
        "under no_grad 1.0",
        "KeyError keeps its type",
        "KeyError keeps its type",
        "WorkerLost",
        "all_gather: True",
    ]
    assert workers[1].returncode == 1


def test_telegrad_run_has_an_option_for_the_drop_in(capsys: pytest.CaptureFixture[str]) -> None:
    from telegrad.cli import main

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--drop-in" in capsys.readouterr().out


DYNAMIC_GROUP = """
import os, threading, torch
import torch.distributed.rpc as rpc

finished = threading.Semaphore(0)

def finish():
    finished.release()

def who():
    return rpc.get_worker_info().name

def members():
    return sorted(info.name for info in rpc._get_current_rpc_agent().get_worker_infos())

rank = int(os.environ["RANK"])
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.environ["STORE"])
rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)  # no world size: a dynamic group
if rank == 0:
    while len(members()) < 3:
        threading.Event().wait(0.01)  # they join in any order
    print(members(), [rpc.rpc_sync(name, who) for name in members()])
    for name in ("worker1", "worker2"):
        rpc.rpc_sync(name, finish)
else:
    finished.acquire()
rpc.shutdown()
"""


def test_workers_can_join_and_leave_a_dynamic_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    names = ["worker0", "worker1", "worker2"]
    assert run_workers(DYNAMIC_GROUP, tmp_path, 3) == [f"{names} {names}"]


NUMBERS = """
import os, torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef

def show(rref):
    return str(rref)

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
if rank == 0:
    one = torch.ones(1)
    rrefs = RRef(1), rpc.remote("worker1", torch.add, (one, 1)), rpc.remote("worker2", torch.neg, (one,))
    for rref in rrefs:
        print(rref)
    try:
        rrefs[1].local_value()
    except RuntimeError as error:
        print(error)
    print("there", rpc.rpc_sync("worker1", show, (rrefs[1],)))
rpc.shutdown()
"""


def test_rrefs_have_unique_ids_that_count_as_torchs_do(tmp_path: Path) -> None:
    def shown(number: int) -> str:
        return f"GloballyUniqueId(created_on=0, local_id={number})"

    assert run_workers(NUMBERS, tmp_path, 3) == sorted(
        [
            f"OwnerRRef({shown(0)})",
            f"UserRRef(RRefId = {shown(1)}, ForkId = {shown(2)})",
            f"UserRRef(RRefId = {shown(3)}, ForkId = {shown(4)})",
            f"For UserRRef(rref_id={shown(1)}, fork_id={shown(2)}), can't call localValue() on user "
            "WorkerInfo(id=0, name=worker0). Call it on owner WorkerInfo(id=1, name=worker1)",
            f"there OwnerRRef({shown(1)})",
        ]
    )
