"""Starts Python programs in processes that have loaded torch already, which takes 1.5 s of CPU time in a new process.

`LoadedPython` is a `subprocess.Popen` for command lines that start with `sys.executable`. Each process that uses it has
a server, which has imported torch and forks for every program. The program runs in `__main__` and ends as in a new
interpreter: by `SystemExit`, a signal, or the end of its code, and then atexit handlers and joined threads.

Not for tests of what is imported when, of `sitecustomize`, or of what the system says about a process (its command line
and first environment): these are the server's. telegrad is never loaded in advance.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import inspect
import json
import os
import runpy
import secrets
import select
import selectors
import socket
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

_PID = struct.Struct("!q")
_LONGEST = 1 << 20  # bytes of a request
_ROOT = str(Path(__file__).parents[2])
_SERVER = f"import sys; sys.path[0] = {_ROOT!r}; from tests.support.loaded_interpreter import main; main()"
_DEADLINE = 100.0  # seconds for the start and the end of a server


class LoadedPython(subprocess.Popen):
    """A program in a process that the server forked. Takes command lines `[sys.executable, ...]`."""

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*args).arguments
        command = [os.fspath(part) for part in given["args"]]
        if command[0] != sys.executable or any(given[name] for name in ("pass_fds", "preexec_fn", "shell")):
            raise ValueError(f"start this with subprocess: {command}")
        pipes = {name: given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")}
        request = {
            "arguments": command[1:],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "session": bool(given["start_new_session"]),
        }
        standard = [pipes["p2cread"], pipes["c2pwrite"], pipes["errwrite"]]
        self._server = _connect()
        socket.send_fds(
            self._server,
            [json.dumps(request).encode()],
            [number if fd == -1 else fd for number, fd in enumerate(standard)],
        )
        self._server.shutdown(socket.SHUT_WR)
        self.pid = _PID.unpack(_read(self._server, _PID.size))[0]
        self._child_created = True
        self._close_pipe_fds(*pipes.values())

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        status = _PID.unpack(_read(self._server, _PID.size))[0]
        self._server.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_loaded(
    command: list[str | Path], *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` with captured text output, in a process that has loaded torch."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with LoadedPython(command, text=True, **piped, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_servers: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
"""Address and process of the server, by the id of the process that started it: a forked child starts its own."""


def _connect() -> socket.socket:
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _start_server()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_servers[os.getpid()][0])
    return connection


def _start_server() -> tuple[str, subprocess.Popen[bytes]]:
    """Start the server. It ends when this process has ended."""
    address = f"\0telegrad-test-{secrets.token_hex(8)}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TELEGRAD_", "PYTHONPATH"))}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, address[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    ready, _, _ = select.select([server.stdout], [], [], _DEADLINE)
    if not ready or server.stdout.read() != b"ready":
        raise RuntimeError("the server that forks loaded interpreters did not start")
    server.stdout.close()
    atexit.register(_end_server, os.getpid())
    return address, server


def _end_server(owner: int) -> None:
    if os.getpid() == owner:
        _, server = _servers.pop(owner)
        server.stdin.close()
        server.wait(_DEADLINE)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise RuntimeError("the server that forks loaded interpreters ended")
        data += piece
    return data


# -- the server -------------------------------------------------------------------------------------------------------


def serve(address: str) -> dict[str, Any] | None:
    """Fork a process for every request, until the other end of standard input is closed.

    Returns None in the server when that has happened, and the request in each forked process.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.bind(f"\0{address}")
        listener.listen()
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        os.write(1, b"ready")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
        stack.callback(lambda: [(os.close(pidfd), owner.close()) for pidfd, (_, owner) in running.items()])
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    return None
                if key.fd != listener.fileno():
                    pid, owner = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with contextlib.suppress(BrokenPipeError), owner:  # it may not wait for this process
                        owner.sendall(_PID.pack(os.waitpid(pid, 0)[1]))
                    continue
                owner = listener.accept()[0]
                request, descriptors = _receive(owner)
                pid = os.fork()
                if pid == 0:
                    owner.close()
                    for number, fd in enumerate(descriptors):
                        os.dup2(fd, number)
                        os.close(fd)
                    return request
                for fd in descriptors:
                    os.close(fd)
                owner.sendall(_PID.pack(pid))
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, owner
                selector.register(pidfd, selectors.EVENT_READ)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 3)
    while piece := connection.recv(_LONGEST):
        data += piece
    return json.loads(data), descriptors


def become(request: dict[str, Any]) -> None:
    """Give this process the environment and the arguments of a new interpreter, and run its program in `__main__`."""
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    arguments = request["arguments"]
    if arguments[:2] == ["-W", "error"]:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
        arguments = arguments[2:]
    path = [entry for entry in request["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:1] = [{"-c": "", "-m": os.getcwd()}.get(arguments[0], os.path.dirname(arguments[0])), *path]
    sys.argv[:] = arguments
    if arguments[0] == "-m":
        del sys.argv[0]
        runpy._run_module_as_main(arguments[1])
        return
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins, __doc__=None, __spec__=None)
    if arguments[0] == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec", dont_inherit=True)
    else:
        main["__file__"] = arguments[0]
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec", dont_inherit=True)
    exec(code, main)


def main() -> None:
    import cloudpickle  # noqa: F401  # loaded for the programs
    import torch  # noqa: F401  # loaded for the programs

    gc.freeze()  # at its end a program does not search these objects for garbage, which would take 0.5 s
    if (request := serve(sys.argv[1])) is not None:
        become(request)
