"""`launch.ray.join` on a real cluster: actors of any class become members, leave, come back, and are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, launch, rpc
from telegrad.errors import TelegradError, WorkerLost


class Counter:
    """A class that knows nothing of telegrad's groups."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def call(self, other: str) -> int:
        found: int = rpc.rpc_sync(other, os.getpid)
        return found

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class AsyncCounter(Counter):
    """An actor that Ray runs on an event loop."""

    async def call(self, other: str) -> int:  # type: ignore[override]  # for Ray it is the same
        found: int = await rpc.rpc_async(other, os.getpid)
        return found


@pytest.fixture
def actors(cluster: Any) -> Iterator[dict[str, Any]]:
    """Two actors, which Ray restarts."""
    import ray

    kinds = {"alice": Counter, "bob": AsyncCounter}
    made = {name: ray.remote(kind).options(num_cpus=1, max_restarts=-1).remote() for name, kind in kinds.items()}
    yield made
    for actor in made.values():
        ray.kill(actor)


def call_again(worker: str) -> int:
    """Call a worker that is lost, or about to be, until another has taken its place."""
    deadline = time.monotonic() + 240
    while True:
        with contextlib.suppress(WorkerLost):
            rpc.wait_for_worker(worker, 240)
            return int(rpc.rpc_sync(worker, os.getpid))
        assert time.monotonic() < deadline


def test_actors_and_the_driver_join_and_leave_as_often_as_they_like(actors: dict[str, Any]) -> None:
    import ray

    pids = []
    for driver in ("driver", "driver", None):
        with launch.ray.join(actors, driver=driver):
            assert ray.get(actors["alice"].add.remote(1)) == len(pids) + 1
            pids.append(ray.get(actors["alice"].call.remote("bob")))
            if driver is None:
                continue
            assert [worker.name for worker in rpc.workers()] == ["driver", "alice", "bob"]
            assert ray.get(actors["bob"].call.remote("driver")) == os.getpid()
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("alice", torch.mul, (x, 2.0)).sum()])
                assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]
        assert ray.get(actors["alice"].add.remote(0)) == len(pids)
    assert len(set(pids)) == 1


def test_an_error_in_the_block_lets_all_leave_at_once(actors: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="of the user"), launch.ray.join(actors):
        raise LookupError("of the user")
    with launch.ray.join(actors), pytest.raises(TelegradError, match="already worker 'driver'"):
        with launch.ray.join(actors):
            pass


def test_an_actor_that_ray_restarts_takes_its_place_again(actors: dict[str, Any]) -> None:
    import ray

    with launch.ray.join(actors):
        before = rpc.rpc_sync("alice", os.getpid)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actors["alice"].die.remote())
        while (after := call_again("alice")) == before:
            pass
        assert ray.get(actors["bob"].call.remote("alice")) == after
        assert [(worker.name, worker.id) for worker in rpc.workers()] == [("driver", 0), ("alice", 1), ("bob", 2)]


def test_an_actor_whose_node_is_killed_comes_back_on_another(cluster: Any, extra_node: Callable[..., Any]) -> None:
    import ray

    doomed = extra_node(resources={"slot": 1})
    carol = ray.remote(Counter).options(num_cpus=1, resources={"slot": 1}, max_restarts=-1).remote()
    try:
        with launch.ray.join({"carol": carol}):
            before = rpc.rpc_sync("carol", os.getpid)
            cluster.remove_node(doomed, allow_graceful=False)
            extra_node(resources={"slot": 1})
            while call_again("carol") == before:
                pass
    finally:
        ray.kill(carol)


def test_a_dead_actor_is_named(actors: dict[str, Any]) -> None:
    import ray

    dead = ray.remote(Counter).options(num_cpus=0).remote()
    ray.get(dead.add.remote(1))
    ray.kill(dead)
    start = time.monotonic()
    with pytest.raises(TelegradError, match=r"(?s)worker 'dave'.*its actor is dead"):
        with launch.ray.join({"alice": actors["alice"], "dave": dead}):
            pass
    assert time.monotonic() - start < 120
