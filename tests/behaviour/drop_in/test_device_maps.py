"""Programs written for torch.distributed.rpc that send tensors between devices, with simulated ones for CUDA's.

The maps, the functions and the error texts are those of torch's own tests (`TensorPipeAgentCudaRpcTest`).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.support.drop_in_programs import run_workers

from telegrad.testing import accelerator

_REASON = accelerator.why_unavailable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

PRELUDE = """
import os
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from telegrad.testing import accelerator
accelerator.install(4)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
name, following = f"worker{rank}", f"worker{(rank + 1) % size}"

def store(case):
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.environ['STORES']}/{case}")

def init(options, name=name):
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)

def attempt(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
"""


def run(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> list[str]:
    monkeypatch.setenv("STORES", str(folder))
    return run_workers(PRELUDE + program, folder, count)


# The example of `TensorPipeRpcBackendOptions.set_device_map` in torch's documentation. An integer is a device of
# whichever accelerator there is.
DOCUMENTED = """
# both workers
def add(x, y):
    print("x:", x)  # tensor([1., 1.], device='cuda:1')
    return x + y, (x + y).to(2)

if rank == 0:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8,
        device_maps={"worker1": {0: 1}}
        # maps worker0's cuda:0 to worker1's cuda:1
    )
    options.set_device_map("worker1", {1: 2})
    # maps worker0's cuda:1 to worker1's cuda:2

    rpc.init_rpc(
        "worker0",
        rank=0,
        world_size=2,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=options
    )

    x = torch.ones(2)
    rets = rpc.rpc_sync("worker1", add, args=(x.to(0), 1))
    # The first argument will be moved to cuda:1 on worker1. When
    # sending the return value back, it will follow the invert of
    # the device map, and hence will be moved back to cuda:0 and
    # cuda:1 on worker0
    print("rets[0]:", rets[0])  # tensor([2., 2.], device='cuda:0')
    print("rets[1]:", rets[1])  # tensor([2., 2.], device='cuda:1')
else:
    rpc.init_rpc("worker1", rank=1, world_size=2)
rpc.shutdown()
"""


def test_the_example_of_torchs_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(DOCUMENTED, tmp_path, monkeypatch) == [
        "rets[0]: tensor([2., 2.], device='sim:0')",
        "rets[1]: tensor([2., 2.], device='sim:1')",
        "x: tensor([1., 1.], device='sim:1')",
    ]


# -- the maps of torch's tests ----------------------------------------------------------------------------------------

# The devices of two arguments, the device of the result on the callee, and the map.
MAPS: dict[str, tuple[Any, Any, Any, dict[Any, Any]]] = {
    "cpu": ("cpu", "cpu", "cpu", {"cpu": "cpu"}),
    "cpu_to_gpu_default": ("cpu", "cpu", 0, {"cpu": 0}),
    "cpu_to_gpu_non_default": ("cpu", "cpu", 1, {"cpu": 1}),
    "gpu_to_cpu_default": (0, 0, "cpu", {0: "cpu"}),
    "gpu_to_cpu_non_default": (1, 1, "cpu", {1: "cpu"}),
    "gpu_default": (0, 0, 0, {0: 0}),
    "gpu_non_default": (1, 1, 1, {1: 1}),
    "gpu_default_to_non_default": (0, 0, 1, {0: 1}),
    "gpu_non_default_to_default": (1, 1, 0, {1: 0}),
    "gpu_mixed_1": (0, 1, 0, {0: 0, 1: 1}),
    "gpu_mixed_2": (0, 1, 1, {0: 0, 1: 1}),
    "gpu_mixed_3": (1, 0, 0, {0: 0, 1: 1}),
    "gpu_mixed_4": (1, 0, 1, {0: 0, 1: 1}),
    "gpu_mixed_5": (0, 1, 0, {0: 1, 1: 0}),
    "gpu_mixed_6": (0, 1, 1, {0: 1, 1: 0}),
    "gpu_mixed_7": (1, 0, 0, {0: 1, 1: 0}),
    "gpu_mixed_8": (1, 0, 1, {0: 1, 1: 0}),
    "cycle": (3, "cpu", 2, {0: 1, 1: 2, 2: 3, 3: 0}),
    "cpu_and_gpu_exchanged": ("cpu", 1, "cpu", {"cpu": 1, 1: "cpu"}),
}

PLACED = """
def add(x, y, z_to):
    return f"{{x.device}} {{y.device}}", x.to(z_to) + y.to(z_to)

for case, (x_from, y_from, z_to, device_map) in {cases}.items():
    for to in ("other", "self"):
        options = store(f"{{case}}-{{to}}")
        callee = following if to == "other" else name
        options.set_device_map(callee, device_map)
        init(options)
        there, z = rpc.rpc_sync(callee, add, (torch.zeros(2).to(x_from), torch.ones(2).to(y_from), z_to))
        later = rpc.rpc_async(callee, add, (torch.zeros(2).to(x_from), torch.ones(2).to(y_from), z_to)).wait()
        assert z.tolist() == [1, 1] and later[0] == there and later[1].device == z.device
        print((case, to, there, str(z.device)))
        rpc.shutdown()
"""


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> set[Any]:
    with pytest.MonkeyPatch.context() as patch:
        return {
            ast.literal_eval(line) for line in run(PLACED.format(cases=MAPS), tmp_path_factory.mktemp("maps"), patch)
        }


def shown(device: Any) -> str:
    return "cpu" if device == "cpu" else f"sim:{device}"


@pytest.mark.parametrize("to", ["other", "self"])
@pytest.mark.parametrize("case", MAPS)
def test_tensors_follow_the_map_and_results_its_reverse(placed: set[Any], case: str, to: str) -> None:
    x_from, y_from, z_to, device_map = MAPS[case]
    there = " ".join(shown(device_map.get(device, device)) for device in (x_from, y_from))
    back = {target: source for source, target in device_map.items()}.get(z_to, z_to)
    assert [line[2:] for line in placed if line[:2] == (case, to)] == [(there, shown(back))]


# -- bad maps ---------------------------------------------------------------------------------------------------------

# How a worker sets the options, and the error on every worker.
BAD_MAPS = {
    "wrong_worker_name": (
        'options.set_device_map("none_exist", {0: 1})',
        "ValueError Node worker0 has invalid target node names in its device maps",
    ),
    "invalid_max_local_device": (
        "options.set_device_map(following, {torch.accelerator.device_count(): 0})",
        "ValueError Node worker0 has source devices with invalid indices in its device map for worker1",
    ),
    "invalid_max_remote_device": (
        "options.set_device_map(following, {0: torch.accelerator.device_count()})",
        "ValueError Node worker0 has target devices with invalid indices in its device map for worker1",
    ),
    "many_to_one": (
        "options.set_device_map(following, {1: 0}); options.set_device_map(following, {0: 0})",
        "ValueError Node worker0 has duplicated target devices in its device map for worker1",
    ),
    "one_to_many": (
        "options.set_device_map(following, {0: 1}); options.set_device_map(following, {0: 0})",
        "ValueError `set_device_map` only supports 1-to-1 mapping, trying to map sim:0 to sim:0 and sim:1",
    ),
    "many_to_one_at_once": (
        "options.set_device_map(following, {0: 1, 1: 1})",
        "ValueError `device_map` only supports 1-to-1 mapping, trying to map sim:1 and sim:0 to sim:1",
    ),
    "invalid_min_local_device": (
        "options.set_device_map(following, {-1: 0})",
        "RuntimeError Device index must not be negative",
    ),
    "invalid_min_remote_device": (
        "options.set_device_map(following, {0: -1})",
        "RuntimeError Device index must not be negative",
    ),
    "devices_option_mismatch": (
        "options.set_device_map(following, {0: 0}); options.set_devices([1])",
        "ValueError Node worker0 has unexpected source devices in its device map for worker1",
    ),
    "devices_option_mismatch_reverse": (
        "options.set_device_map(following, {0: 1}); options.set_devices([0])",
        "ValueError Node worker0 has unexpected target devices in its device map for worker1",
    ),
    "duplicated_devices": (
        "options.set_devices([1, 1])",
        "ValueError Node worker0 has duplicated devices",
    ),
    "invalid_devices": (
        "options.set_devices([torch.accelerator.device_count()])",
        "ValueError Node worker0 has devices with invalid indices",
    ),
    "devices_on_the_cpu": (
        'options.set_devices(["cpu"])',
        "ValueError `set_devices` expect a list of CUDA devices, but got device type cpu.",
    ),
    "another_accelerator": (
        'options.set_device_map(following, {"cuda:0": 0})',
        "ValueError Node worker0 has source devices with invalid indices in its device map for worker1",
    ),
}

REFUSED = """
for case, (setting, _) in {cases}.items():
    options = store(case)
    try:
        exec(setting)
        init(options)
    except (ValueError, RuntimeError) as error:
        print((case, type(error).__name__ + " " + str(error).splitlines()[0]))
    assert not rpc.api._is_current_rpc_agent_set()
init(store("after"))
assert rpc.rpc_sync(following, torch.add, (torch.ones(1), 1)).item() == 2
rpc.shutdown()
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        lines = run(REFUSED.format(cases=BAD_MAPS), tmp_path_factory.mktemp("bad-maps"), patch)
    return [ast.literal_eval(line) for line in lines]


@pytest.mark.parametrize("case", BAD_MAPS)
def test_bad_maps_are_torchs_errors_on_every_worker(refused: list[Any], case: str) -> None:
    assert [text for name, text in refused if name == case] == [BAD_MAPS[case][1]] * 2


# -- devices that are not mapped --------------------------------------------------------------------------------------

MISSING = """
def add_there(x, y):
    return (x + y).to(0)

only_cpu = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them "
    "over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping. "
)
request = f"{only_cpu}Request device mapping is not available for destination {following}"
response = f"{only_cpu}Response device mapping is not available for destination {name}"

def works():
    return rpc.rpc_sync(following, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]

init(store("none"))
x = torch.zeros(2).to(0)
for _ in range(100):
    assert attempt(rpc.rpc_sync, following, torch.add, (x, 1)) == request + ", but found tensor on device: sim:0"
    assert response + ", but found tensor on device: sim:0" in attempt(rpc.rpc_sync, following, add_there, (x.cpu(), 1))
    assert works()
assert attempt(rpc.rpc_async, following, torch.add, (x, 1)) == request + ", but found tensor on device: sim:0"
assert attempt(rpc.remote, following, torch.add, (x, 1)) == request + ", but found tensor on device: sim:0"
assert response in attempt(rpc.rpc_async(following, add_there, (x.cpu(), 1)).wait)
assert response in attempt(rpc.remote(following, add_there, (x.cpu(), 1)).to_here)
rref = rpc.remote(following, add_there, (x.cpu(), 1))
assert request in attempt(rref.rpc_sync().add, x)
assert request in attempt(rref.rpc_async().add, x)
assert request in attempt(rref.remote().add, x)
assert response in attempt(rref.rpc_sync().add, 1)
assert rref.rpc_sync().tolist() == [1, 1]
assert f"destination {name}, but" in attempt(rpc.rpc_sync, name, torch.add, (x, 1))  # in calls to itself, too
local = rpc.RRef(x)
assert local.to_here() is x and local.local_value() is x
assert works()
rpc.shutdown()

options = store("other device")
options.set_device_map(following, {1: 2})
init(options)
options.set_device_map(following, {0: 0})  # too late
assert attempt(rpc.rpc_sync, following, torch.add, (x, 1)) == (
    request + " for device sim:0 but received a tensor on that device."
)
assert response + " for device sim:0 but received a tensor on that device." in attempt(
    rpc.rpc_sync, following, add_there, (x.cpu(), 1)
)
agent = rpc.api._get_current_rpc_agent()
assert agent._get_device_map(rpc.get_worker_info(following)) == {torch.device(1): torch.device(2)}
assert agent._get_device_map(rpc.get_worker_info()) == {}
assert rpc.rpc_sync(following, torch.add, (x.to(1), 1)).device == torch.device(1)
assert works()
rpc.shutdown()
print("done")
"""


def test_a_device_that_is_not_mapped_is_torchs_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(MISSING, tmp_path, monkeypatch) == ["done", "done"]


# -- RRefs ------------------------------------------------------------------------------------------------------------

RREFS = """
from torch.distributed.rpc import RRef

class Net(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.net = torch.nn.Linear(3, 2).to(device)

    def forward(self, x, is_rref=False):
        x = x.to_here() if is_rref else x
        assert x.device == self.net.weight.device, x.device
        return self.net(x)

def relay(rref):
    return rref.to_here()

def ones(device):
    return torch.ones(2).to(device)

@rpc.functions.async_execution
def added_later(to, x, y, z):
    return rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.wait() + z)

def same(x, y):
    return x.device == y.device and torch.equal(x, y)

def exchanged(x, y):
    assert (x.device, y.device) == (torch.device(1), torch.device(0))
    return x.to(0) + y, x - y.to(1), torch.arange(12.0).view(4, 3).to(1).split(2)[1]

for local, remote in ((0, 0), (0, 1), (1, 0), (1, 1)):
    # The result of a method and of to_here(); an RRef as an argument, whose value is fetched by the reverse.
    options = store(f"arguments-{local}-{remote}")
    options.set_device_map(following, {local: remote})
    options.set_device_map(f"worker{(rank - 1) % size}", {remote: local})
    init(options)
    net = rpc.remote(following, Net, (remote,))
    x = torch.randn(4, 3).to(local)
    expected = net.rpc_sync().forward(x)
    assert expected.device == torch.device(local)
    assert same(net.remote().forward(x).to_here(), expected)
    assert same(net.rpc_async().forward(x).wait(), expected)
    assert same(net.remote().forward(RRef(x), True).to_here(), expected)
    assert same(net.rpc_sync().forward(RRef(x), True), expected)
    assert rpc.remote(following, ones, (remote,)).to_here().device == torch.device(local)
    rpc.shutdown()

    # An output that is fetched by a third worker, and returned to the first.
    options = store(f"relay-{local}-{remote}")
    if rank == 0:
        options.set_device_map("worker1", {local: remote})
        options.set_device_map("worker2", {local: local})
    elif rank == 1:
        options.set_device_map("worker0", {remote: local})
    else:
        options.set_device_map("worker1", {local: remote})
    init(options)
    if rank == 0:
        net, x = rpc.remote("worker1", Net, (remote,)), RRef(torch.randn(4, 3).to(local))
        out = rpc.remote("worker2", relay, (net.remote().forward(x, True),)).to_here()
        assert same(out, net.rpc_sync().forward(x, True)) and out.device == torch.device(local)
    rpc.shutdown()

    # A worker that owns what it calls.
    options = store(f"owner-{local}-{remote}")
    options.set_device_map(name, {local: remote})
    init(options)
    model = rpc.remote(name, torch.nn.Linear, (3, 2)).remote().to(remote)
    x = torch.rand(4, 3).to(local)
    output = model.rpc_sync().forward(x)
    assert output.device == torch.device(local)
    assert RRef(output).remote().sum().to_here().item() == output.sum().item()
    assert model.remote().forward(x).to_here().device == torch.device(remote)  # which the owner does not send
    rpc.shutdown()

# A function that returns a future, on a worker that calls another.
options = store("async")
options.set_device_map(following, {0: 1, 1: 2})
init(options)
x = torch.ones(2).to(0)
z = rpc.rpc_sync(following, added_later, (f"worker{(rank + 2) % size}", x, x, x))
assert z.device == torch.device(0) and z.tolist() == [3, 3]
rpc.shutdown()

# Several results, and a view of a larger one.
options = store("several")
options.set_device_map(following, {0: 1})
options.set_device_map(following, {1: 0})
init(options)
a, b, view = rpc.rpc_sync(following, exchanged, (torch.zeros(2).to(0), torch.ones(2).to(1)))
assert (a.device, b.device, view.device) == (torch.device(1), torch.device(0), torch.device(0))
assert (a.tolist(), b.tolist(), view.tolist()) == ([1, 1], [-1, -1], [[6, 7, 8], [9, 10, 11]])
try:
    rpc.rpc_sync(following, torch.add, (torch.zeros(2).to(0), torch.ones(2).to(1)))
except RuntimeError as error:
    assert "Expected all tensors to be on the same device" in str(error), error
rpc.shutdown()
print("done")
"""


def test_rrefs_follow_the_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(RREFS, tmp_path, monkeypatch, 3) == ["done"] * 3


# -- autograd ---------------------------------------------------------------------------------------------------------

GRADIENTS = """
weight = torch.full((2,), 3.0, requires_grad=True, device=torch.device(3))

def scale(x):
    assert x.device == torch.device(2), x.device
    return x * weight.to(2)

def gradient(context):
    return str(dist_autograd.get_gradients(context)[weight].device)

options = store("gradients")
if rank == 0:
    options.set_device_map("worker1", {1: 2})
init(options)
if rank == 0:
    leaf = torch.ones(2, requires_grad=True)
    moved = torch.ones(2, requires_grad=True, device=torch.device(1))
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", scale, (leaf.to(1) * moved,))
        assert y.device == torch.device(1)
        dist_autograd.backward(context, [y.sum()])
        found = dist_autograd.get_gradients(context)
        print("here", found[leaf].device, found[leaf].tolist(), found[moved].device, found[moved].tolist())
        print("there", rpc.rpc_sync("worker1", gradient, (context,)))
rpc.shutdown()
"""


def test_gradients_go_back_to_where_the_tensors_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(GRADIENTS, tmp_path, monkeypatch) == ["here cpu [3.0, 3.0] sim:1 [3.0, 3.0]", "there sim:3"]


# -- dynamic groups ---------------------------------------------------------------------------------------------------

DYNAMIC = """
gate = torch.distributed.FileStore(f"{os.environ['STORES']}/gate", size)
options = store("members")
if rank == 0:
    options.set_device_map("worker2", {0: 1, 1: 0})  # before that worker joins
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    gate.set("created", "")
    gate.wait(["joined"])
    y = rpc.rpc_sync("worker2", torch.add, (torch.ones(2).to(0), 1))
    print(f"{y} {[info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()]}")
    gate.set("called", "")
elif rank == 1:
    gate.wait(["created"])
    options.set_device_map("worker0", {0: 9})
    try:
        rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    except ValueError as error:
        print(str(error).splitlines()[0])
    gate.set("refused", "")
    gate.wait(["called"])
else:
    gate.wait(["refused"])
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    gate.set("joined", "")
    gate.wait(["called"])
if rank != 1:
    rpc.shutdown()
"""


def test_a_dynamic_group_checks_and_follows_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(DYNAMIC, tmp_path, monkeypatch, 3) == [
        "Node worker1 has target devices with invalid indices in its device map for worker0",
        "tensor([2., 2.], device='sim:0') ['worker0', 'worker2']",
    ]
