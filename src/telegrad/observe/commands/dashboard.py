"""``telegrad dashboard``: a web page that shows a running group."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import Mapping

from telegrad.errors import TelegradError
from telegrad.observe.attach import Attached, attach
from telegrad.observe.commands.common import add_group_options, print_json
from telegrad.observe.dashboard.access import is_loopback
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.dashboard.server import Server, check_installed
from telegrad.observe.dashboard.source import AttachedSource
from telegrad.observe.metrics import GroupMetrics
from telegrad.observe.printable import printable

TOKEN_VARIABLE = "TELEGRAD_DASHBOARD_TOKEN"
_SHORTEST_TOKEN = 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "dashboard",
        help="show a running group as a web page",
        description="Serve a web page that shows a running group: workers, calls, backward passes, a timeline, and "
        "what is stuck. Only this machine can reach it, and only with the printed address, which carries a random "
        f"token ({TOKEN_VARIABLE} sets another). Ctrl-C ends it.",
    )
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="TCP port (default: any free one)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--interval", type=float, default=0.5, metavar="SECONDS", help="between looks (default: 0.5)")
    parser.add_argument(
        "--older", type=float, default=5.0, metavar="SECONDS", help="age at which a call counts as stuck (default: 5)"
    )
    return add_group_options(parser)


def run(options: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    try:
        check_installed()
        token = given_token(os.environ)
        with AttachedSource(lambda: _attach(options), options.older, options.timeout) as source:
            metrics = GroupMetrics() if importlib.util.find_spec("prometheus_client") else None
            on_view, render = (None, None) if metrics is None else (metrics.add, metrics.render)
            feed = Feed(source.look, source.stuck, options.interval, on_view)
            server = Server(feed, options.host, options.port, token, render)
            _serve(server, options)
    except (TelegradError, OSError) as error:
        print(f"telegrad dashboard: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def given_token(environ: Mapping[str, str]) -> str | None:
    """Return the token that the environment sets, if any."""
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise TelegradError(
            f"{TOKEN_VARIABLE} must have at least {_SHORTEST_TOKEN} characters of ASCII, so that nobody can guess it: "
            "use the output of `telegrad token`"
        )
    return token or None


def _attach(options: argparse.Namespace) -> Attached:
    return attach(options.address, options.group, options.runtime_dir)


def _serve(server: Server, options: argparse.Namespace) -> None:
    server.start()
    try:
        if options.json:
            print_json({"url": server.url})
        else:
            print(f"The dashboard is at {server.url}\nWhoever has this address can see the group. Ctrl-C ends it.")
        sys.stdout.flush()
        if not is_loopback(options.host):
            print(
                f"The page is not encrypted, and {options.host} can be reached from other machines: "
                "put a proxy with TLS before it, or use ssh -L.",
                file=sys.stderr,
            )
        if not options.no_open and can_open(os.environ):
            webbrowser.open(server.url)
        threading.Event().wait()
    finally:
        server.close()


def can_open(environ: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Return whether a browser can be opened that is not one for the terminal.

    >>> can_open({"DISPLAY": ":0"}, "linux"), can_open({}, "linux"), can_open({}, "darwin")
    (True, False, True)
    """
    return platform in ("darwin", "win32") or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))
