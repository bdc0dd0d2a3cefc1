"""Serves the dashboard with uvicorn, on a thread of its own.

starlette and uvicorn are the extra ``telegrad[dashboard]``. They are imported when a server is made.
"""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

from telegrad.errors import TelegradError
from telegrad.observe.dashboard.access import Access
from telegrad.observe.dashboard.feed import Feed

if TYPE_CHECKING:
    from telegrad.observe.dashboard.app import Metrics


def check_installed(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise an error that names the extra if starlette or uvicorn is missing."""
    missing = [name for name in ("starlette", "uvicorn") if find(name) is None]
    if missing:
        raise TelegradError(
            f"the dashboard needs {' and '.join(missing)}, which this Python does not have: "
            "install them with `pip install 'telegrad[dashboard]'`"
        )


class Server:
    """A dashboard that is being served."""

    def __init__(
        self,
        feed: Feed,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        check_installed()
        import uvicorn

        from telegrad.observe.dashboard.app import make_app
        from telegrad.observe.dashboard.connections import BoundedProtocol

        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.access = Access(self.port, host, token)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}/?token={quote(self.access.token)}"
        self.feed = feed
        config = uvicorn.Config(
            make_app(feed, self.access, metrics),
            log_level="error",  # warnings are about requests that anybody can send
            access_log=False,
            lifespan="off",
            http=BoundedProtocol,
            ws="none",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="telegrad-dashboard", daemon=True)

    def start(self) -> None:
        """Begin to look at the group, and to serve."""
        self.feed.start()
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Stop serving, and close all connections."""
        self.feed.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TelegradError(
            f"the dashboard cannot listen on {host} port {port}: {error.strerror or error}; "
            "choose another --port, or 0 for any free one"
        ) from error
    return listener
