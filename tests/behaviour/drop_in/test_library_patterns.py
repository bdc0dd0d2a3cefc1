"""Patterns of libraries that use torch.distributed.rpc and some private names of torch."""

from __future__ import annotations

from pathlib import Path

from tests.support.drop_in_programs import run_workers

# As in PyTorch's example of batched reinforcement learning: each player requests an action, and gets a reply when all
# have requested one, from a single batch. The replies are `then` futures of one plain future.
BATCHED = """
import os, threading, torch
import torch.distributed.rpc as rpc

PLAYERS, ROUNDS = 2, 3

class Policy:
    def __init__(self):
        self.lock = threading.Lock()
        self.weight = torch.tensor([1.0, 10.0])
        self.asked = {}
        self.batch = torch.futures.Future()
        self.batches = 0

    @staticmethod
    @rpc.functions.async_execution
    def act(policy, player, state):
        self = policy.local_value()
        with self.lock:
            mine = self.batch.then(lambda batch: batch.wait()[player].item())
            self.asked[player] = state
            if len(self.asked) == PLAYERS:
                states = torch.stack([self.asked[number] for number in sorted(self.asked)])
                full, self.batch, self.asked = self.batch, torch.futures.Future(), {}
                self.batches += 1
                full.set_result((states * self.weight).sum(1))
        return mine

class Player:
    def __init__(self, number):
        self.number = number

    def play(self, policy):
        score = 0.0
        for round in range(ROUNDS):
            state = torch.tensor([float(round), float(self.number)])
            score += rpc.rpc_sync(policy.owner(), Policy.act, args=(policy, self.number, state))
        return score

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1 + PLAYERS)
if rank == 0:
    policy = rpc.RRef(Policy())
    players = [rpc.remote(f"worker{1 + number}", Player, args=(number,)) for number in range(PLAYERS)]
    scores = torch.futures.wait_all([player.rpc_async().play(policy) for player in players])
    print("scores", scores, "batches", policy.local_value().batches)
rpc.shutdown()
"""


def test_batched_replies_to_many_callers(tmp_path: Path) -> None:
    assert run_workers(BATCHED, tmp_path, 3) == ["scores [3.0, 33.0] batches 3"]


# As in a library for graphs: it asks the C++ module whether there is an agent, before it starts and before it stops
# one, and wraps its functions with private helpers of torch.distributed.rpc.api.
ASKS_FOR_AN_AGENT = """
import os, torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _is_current_rpc_agent_set
from torch.distributed.rpc.api import _all_gather, _require_initialized

def start(rank, world_size):
    if _is_current_rpc_agent_set():
        return "was started"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return "starts"

@_require_initialized
def gather(value):
    return sorted(_all_gather(value).items())

def stop():
    if not _is_current_rpc_agent_set():
        return "was stopped"
    rpc.shutdown(graceful=True)
    return "stops"

try:
    gather(0)
except RuntimeError as error:
    early = "has not been initialized" in str(error)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(rank, early, start(rank, size), start(rank, size), gather(rank), stop(), stop())
"""


def test_a_library_that_checks_for_an_agent(tmp_path: Path) -> None:
    gathered = "[('worker0', 0), ('worker1', 1)]"
    assert run_workers(ASKS_FOR_AN_AGENT, tmp_path, 2) == [
        f"{rank} True starts was started {gathered} stops was stopped" for rank in range(2)
    ]


# As in a library for replay buffers: its methods can be called with the object, or with a reference to it where the
# object lives, which they know by its class in the C++ module.
TAKES_OBJECT_OR_REFERENCE = """
import functools, os, torch
import torch.distributed.rpc as rpc

def by_reference_too(method):
    @functools.wraps(method)
    def called(self, *args, **kwargs):
        if isinstance(self, torch._C._distributed_rpc.PyRRef):
            self = self.local_value()
        return method(self, *args, **kwargs)
    return called

class Buffer:
    def __init__(self):
        self.items = []

    @by_reference_too
    def extend(self, items):
        self.items += list(items)
        return len(self.items)

    @by_reference_too
    def sample(self, count):
        return torch.stack(self.items[-count:])

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    buffer = rpc.remote("worker1", Buffer)
    for number in range(3):
        count = rpc.rpc_sync(buffer.owner(), Buffer.extend, args=(buffer, torch.full((2, 1), float(number))))
    sample = rpc.remote(buffer.owner(), Buffer.sample, args=(buffer, 3))
    print(count, sample.to_here().flatten().tolist(), Buffer().extend([1]))
rpc.shutdown()
"""


def test_methods_that_take_an_object_or_an_rref_to_it(tmp_path: Path) -> None:
    assert run_workers(TAKES_OBJECT_OR_REFERENCE, tmp_path, 2) == ["6 [1.0, 2.0, 2.0] 1"]
