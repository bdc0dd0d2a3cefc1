"""What would one use instead? Ray's actors, and calls written by hand on ZeroMQ, beside telegrad and torch.

Each is left out where it is not installed (`pip install -e ".[bench]"` installs both).

    python benchmarks/others.py [--cases noop echo ...] [--blocks N] [--quick] [--json FILE]

All cases are those of `calls.py`. Ray always has its own ways between processes of one host. ZeroMQ has a unix socket
or a TCP one, and the least code that can serve: calls in one thread, in order, without deadlines, errors or sessions.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import command
import torch
from pairs import CALLEE, CALLER, TELEGRAD, TORCH, Case, Place, System, Workers, join_telegrad, join_torch

import calls

RAY, ZEROMQ = "Ray", "pyzmq"
PACKAGES = {RAY: "ray", ZEROMQ: "zmq"}
CHOSEN = "noop", "echo", "add", "async", "64KB", "1MB", "16MB"
END = b"end"


# -- Ray ------------------------------------------------------------------------------------------------------


class RayCalls:
    """A group in which the callee is an actor, with a method for each function that is called."""

    def __init__(self, place: Place) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what it will do in future, and warns of otherwise
        import ray

        class Callee:
            # In this place, so that it is sent to the actor's process and needs no file of ours there.
            def noop(self) -> None:
                pass

            def echo(self, value: Any) -> Any:
                return value

            def add(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                return torch.add(one, other)

        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=f"{place.directory}/ray",
        )
        self._ray = ray
        self._actor = ray.remote(Callee).remote()

    def rpc_async(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> RayFuture:
        """Call the method that has this function's name."""
        reference = getattr(self._actor, function.__name__).remote(*arguments)
        return RayFuture(self._ray, reference)

    def rpc_sync(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        """The same, and wait."""
        return self.rpc_async(to, function, arguments).wait()

    def shutdown(self) -> None:
        """End all of Ray's processes."""
        self._ray.shutdown()


class RayFuture:
    """A result that is on its way, with the one method that cases use."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def wait(self) -> Any:
        """Wait for it."""
        return self._ray.get(self._reference)


# -- ZeroMQ ---------------------------------------------------------------------------------------------------


class ZeroMQCalls:
    """Two sockets, and a thread that serves; what is called is pickled, with tensors beside the pickle."""

    def __init__(self, place: Place) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._thread: threading.Thread | None = None
        if place.name == CALLEE:
            self._socket.bind("tcp://127.0.0.1:*" if place.transport == "tcp" else f"ipc://{place.directory}/zeromq")
            place.socket.sendall(self._socket.getsockopt(zmq.LAST_ENDPOINT))
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()
        else:
            self._socket.connect(place.socket.recv(1024).rstrip(b"\0").decode())

    def rpc_async(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> ZeroMQCalls:
        """Send the call. Answers come in the order of the calls: whoever waits takes the next one."""
        self._socket.send_multipart(_encode((function, arguments)), copy=False)
        return self

    def wait(self) -> Any:
        """Wait for the next answer."""
        return _decode(self._socket.recv_multipart(copy=False))

    def rpc_sync(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Call, and wait."""
        return self.rpc_async(to, function, arguments).wait()

    def _serve(self) -> None:
        while (frames := self._socket.recv_multipart(copy=False))[0].bytes != END:
            function, arguments = _decode(frames)
            self._socket.send_multipart(_encode(function(*arguments)), copy=False)

    def shutdown(self) -> None:
        """The caller tells the callee; both close."""
        if self._thread is None:
            self._socket.send(END)
        else:
            self._thread.join()
        self._socket.close()
        self._context.term()


class _Pickler(pickle.Pickler):
    """Takes tensors out, as arrays, whose memory pickle leaves beside."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def _encode(value: Any) -> list[Any]:
    beside: list[Any] = []
    with io.BytesIO() as head:
        _Pickler(head, protocol=5, buffer_callback=beside.append).dump(value)
        return [head.getvalue(), *(buffer.raw() for buffer in beside)]


def _decode(frames: list[Any]) -> Any:
    return pickle.loads(frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]])


# -- the comparison -------------------------------------------------------------------------------------------

SYSTEMS = {
    RAY: System(RayCalls, (CALLER,)),
    ZEROMQ: System(ZeroMQCalls),
}


def installed() -> list[str]:
    """Which of them are here."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is not None]


def versions() -> dict[str, str]:
    """The versions of those that are here."""
    return {name: version(name.lower()) for name in installed()}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """All that are here, in every case."""
    return {name: (workers, case) for name, workers in ready.items()}


CASES: dict[str, Case] = {name: replace(calls.CASES[name], targets={}) for name in CHOSEN}
BENCHMARK = command.Benchmark(
    "others.py",
    "Compare calls of telegrad with those of Ray's actors, and with what can be written on ZeroMQ.",
    CASES,
    {
        TORCH: System(join_torch),
        TELEGRAD: System(join_telegrad),
        **{name: SYSTEMS[name] for name in installed()},
    },
    turns,
)


def explain_absence() -> None:
    """Say in one line each which are not measured."""
    for name in sorted(SYSTEMS.keys() - installed()):
        print(
            f'others.py: {name} is not installed and is left out; pip install -e ".[bench]" installs it',
            file=sys.stderr,
        )


if __name__ == "__main__":
    # The same module again, under its own name: what is called remotely must be found by that on the other side.
    import others

    others.explain_absence()
    sys.exit(command.run(others.BENCHMARK))
