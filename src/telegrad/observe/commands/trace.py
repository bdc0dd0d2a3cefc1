"""``telegrad trace``: records what all workers do for some seconds, for Perfetto or as a picture."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from telegrad.observe.attach import Attached, GroupEnded
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import add_group_options, look, print_json
from telegrad.observe.model import EventPosition, GroupView, ViewRequest
from telegrad.observe.printable import printable
from telegrad.observe.record_trace import INTERVAL, EventReader, Trace


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "trace",
        help="record what all workers do, for Perfetto or as a picture",
        description="Record what all workers do for some seconds, on one clock: calls, passes, waits and transfers, "
        "with arrows from caller to callee and along the backward pass. Ctrl-C ends the recording early.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="where to write it: a trace for Perfetto, or a picture if it ends with .svg (default: trace.json)",
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="N", help="for how long to record (default: 5)")
    parser.add_argument("--merged", action="store_true", help="a picture with one row per worker, not per thread")
    return add_group_options(parser)


def run(options: argparse.Namespace) -> int:
    """Record, write the file, and print how each worker spent its time. The exit code is 3 if something is missing."""
    if not options.seconds >= 0:
        print(f"telegrad trace: --seconds must be at least 0, not {options.seconds:g}", file=sys.stderr)
        return 2
    if options.output.suffix not in (".json", ".svg"):
        print(f"telegrad trace: the output ends with .json or .svg, unlike {str(options.output)!r}", file=sys.stderr)
        return 2
    if not options.output.absolute().parent.is_dir():
        print(f"telegrad trace: there is no folder {str(options.output.parent)!r} to write to", file=sys.stderr)
        return 2

    def record(attached: Attached) -> int:
        trace = _record(attached, options.seconds, options.timeout)
        slices = trace.save(options.output, merged=options.merged)
        if options.json:
            about = {"file": str(options.output), "slices": slices, "missing": trace.gaps()}
            shares = [
                {"worker": share.worker, **share.parts(), "calls served": share.calls} for share in trace.shares()
            ]
            print_json({**about, "workers": shares})
        else:
            print(printable(trace.summary()))
            print(f"\n{options.output}: {slices} slices. {_how_to_open(options.output)}")
        return 3 if trace.gaps() else 0

    return look(options, record)


def _how_to_open(path: Path) -> str:
    if path.suffix == ".svg":
        return "Open it in a browser."
    return "Open it at https://ui.perfetto.dev (it stays on this machine), or in chrome://tracing."


def _record(attached: Attached, seconds: float, timeout: float) -> Trace:
    def ask(request: ViewRequest, since: Mapping[str, EventPosition], clocks: bool) -> GroupView:
        return attached.look(AttachRequest(request, dict(since), timeout, clocks))

    reader = EventReader(ask)
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0 and not reader.recording.full:
            time.sleep(min(left, INTERVAL))
            if time.monotonic() < end:
                reader.read()
    except KeyboardInterrupt:  # then what was read so far is the trace
        print("telegrad trace: interrupted", file=sys.stderr)
    except GroupEnded:  # as above
        return _ended(reader)
    try:
        return reader.stop()
    except GroupEnded:
        return _ended(reader)


def _ended(reader: EventReader) -> Trace:
    print("telegrad trace: the group has ended; the trace shows what was read before", file=sys.stderr)
    return reader.trace()
