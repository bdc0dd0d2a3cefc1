"""Compares calls with Ray actors and with hand-written RPC on ZeroMQ.

Each is skipped if it is not installed (`pip install -e ".[bench]"` installs both).

    python benchmarks/others.py [--cases noop echo ...] [--blocks N] [--quick] [--json FILE]

The cases are those of `calls.py`. Ray always uses its own transport between processes on a host. ZeroMQ uses a unix or
TCP socket and minimal code: calls in one thread, in order, without deadlines, errors or sessions.
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
from pairs import CALLEE, CALLER, TELEGRAD, TORCH, Case, System, Workers, WorkerSpec, join_telegrad, join_torch

import calls

RAY, ZEROMQ = "Ray", "pyzmq"
PACKAGES = {RAY: "ray", ZEROMQ: "zmq"}
CHOSEN = "noop", "echo", "add", "async", "64KB", "1MB", "16MB"
END = b"end"


# -- Ray ------------------------------------------------------------------------------------------------------


class RayCalls:
    """Ray, with the callee as an actor that has a method for each function."""

    def __init__(self, spec: WorkerSpec) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # the future default; Ray warns otherwise
        import ray

        class Callee:
            # Defined here so that Ray sends it to the actor's process by value.
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
            _temp_dir=f"{spec.directory}/ray",
        )
        self._ray = ray
        self._actor = ray.remote(Callee).remote()

    def rpc_async(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> RayFuture:
        """Call the actor's method with the name of this function."""
        reference = getattr(self._actor, function.__name__).remote(*arguments)
        return RayFuture(self._ray, reference)

    def rpc_sync(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Call and wait."""
        return self.rpc_async(to, function, arguments).wait()

    def shutdown(self) -> None:
        """Stop all of Ray's processes."""
        self._ray.shutdown()


class RayFuture:
    """A future with the one method that cases use."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def wait(self) -> Any:
        """Wait for the result."""
        return self._ray.get(self._reference)


# -- ZeroMQ ---------------------------------------------------------------------------------------------------


class ZeroMQCalls:
    """Two sockets and a serving thread. Calls are pickled, with tensors out of band."""

    def __init__(self, spec: WorkerSpec) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._thread: threading.Thread | None = None
        if spec.name == CALLEE:
            self._socket.bind("tcp://127.0.0.1:*" if spec.transport == "tcp" else f"ipc://{spec.directory}/zeromq")
            spec.socket.sendall(self._socket.getsockopt(zmq.LAST_ENDPOINT))
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()
        else:
            self._socket.connect(spec.socket.recv(1024).rstrip(b"\0").decode())

    def rpc_async(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> ZeroMQCalls:
        """Send the call. Replies arrive in the order of the calls, so `wait` takes the next one."""
        self._socket.send_multipart(_encode((function, arguments)), copy=False)
        return self

    def wait(self) -> Any:
        """Wait for the next reply."""
        return _decode(self._socket.recv_multipart(copy=False))

    def rpc_sync(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Call and wait."""
        return self.rpc_async(to, function, arguments).wait()

    def _serve(self) -> None:
        while (frames := self._socket.recv_multipart(copy=False))[0].bytes != END:
            function, arguments = _decode(frames)
            self._socket.send_multipart(_encode(function(*arguments)), copy=False)

    def shutdown(self) -> None:
        """Tell the callee to stop, and close the sockets."""
        if self._thread is None:
            self._socket.send(END)
        else:
            self._thread.join()
        self._socket.close()
        self._context.term()


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory goes out of band."""

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
    """Return the systems that are installed."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is not None]


def versions() -> dict[str, str]:
    """Return the versions of the installed systems."""
    return {name: version(name.lower()) for name in installed()}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return all systems, in every case."""
    return {name: (workers, case) for name, workers in ready.items()}


CASES: dict[str, Case] = {name: replace(calls.CASES[name], targets={}) for name in CHOSEN}
BENCHMARK = command.Benchmark(
    "others.py",
    "Compare calls of telegrad with Ray actors and with hand-written RPC on ZeroMQ.",
    CASES,
    {
        TORCH: System(join_torch),
        TELEGRAD: System(join_telegrad),
        **{name: SYSTEMS[name] for name in installed()},
    },
    turns,
)


def explain_absence() -> None:
    """Print one line for each system that is not installed."""
    for name in sorted(SYSTEMS.keys() - installed()):
        print(
            f'others.py: {name} is not installed and is skipped; pip install -e ".[bench]" installs it',
            file=sys.stderr,
        )


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import others

    others.explain_absence()
    sys.exit(command.run(others.BENCHMARK))
