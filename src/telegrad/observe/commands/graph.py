"""``telegrad graph``: the distributed autograd graph of a context, as a picture or an interactive page."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from telegrad.errors import TelegradError
from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import add_group_options, look, print_json, print_table
from telegrad.observe.graph import ContextGraph, join
from telegrad.observe.graph_fold import READABLE, fold
from telegrad.observe.graph_page import render_page
from telegrad.observe.graph_svg import render_graph
from telegrad.observe.model import GroupView, ViewRequest
from telegrad.observe.printable import one_line

_PAUSE = 0.02  # seconds between two looks for a context
_PAGE_NODES = 400
"""So many can be looked at in a page, where one can zoom."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "graph",
        help="draw the autograd graph of a context over all workers",
        description="Draw the autograd graph of a context over all workers, with the state of each node in a running "
        "pass. Without -o, say what it consists of.",
    )
    parser.add_argument(
        "context", metavar="CONTEXT", nargs="?", help="the id of the context (default: the latest that exists)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="graph.svg for a picture, graph.html for a page to zoom, point at and fold",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=f"fold chains and leaves beyond so many nodes (default: {READABLE} in a picture, {_PAGE_NODES} in a page)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for a context, if none exists (default: 5)",
    )
    return add_group_options(parser)


class NoContext(TelegradError):
    """There is no context to draw at the moment."""


def run(options: argparse.Namespace) -> int:
    """Draw the graph. The exit code is 3 if a worker did not answer."""
    try:
        wanted = None if options.context is None else int(options.context, 0)
    except ValueError:
        print(f"telegrad graph: {options.context!r} is no id of a context, such as 0x1a2b", file=sys.stderr)
        return 2
    output: Path | None = options.output
    if output is not None and output.suffix not in (".svg", ".html"):
        print(f"telegrad graph: the output ends with .svg or .html, unlike {str(output)!r}", file=sys.stderr)
        return 2

    def draw(attached: Attached) -> int:
        graph = _find(attached, wanted, options.wait, options.timeout)
        if options.json:
            print_json(graph)
        elif output is None:
            _print(graph)
        else:
            _write(graph, output, options.nodes)
        return 3 if graph.silent else 0

    return look(options, draw)


def _find(attached: Attached, wanted: int | None, seconds: float, timeout: float) -> ContextGraph:
    """Return the graph of a context, and wait for one: in a training, each exists for a moment only."""
    until = time.monotonic() + seconds
    while True:
        try:
            context = choose(attached.look(AttachRequest(timeout=timeout)), wanted)
            return graph_of(attached.look(AttachRequest(ViewRequest(nodes=context), timeout=timeout)), context)
        except NoContext:
            if wanted is not None or time.monotonic() >= until:
                raise
            time.sleep(_PAUSE)


def choose(group: GroupView, wanted: int | None) -> int:
    """Return the wanted context, or else the latest that exists. Raises if there is none."""
    began: dict[int, float] = {}
    for view in group.workers:
        offset = group.offsets.get(view.name, 0.0)
        for context in view.contexts:
            began[context.id] = min(began.get(context.id, float("inf")), context.began + offset)
    if wanted is not None:
        if wanted not in began:
            existing = ", ".join(f"{each:#x}" for each in sorted(began, key=began.__getitem__)[-8:]) or "none"
            raise TelegradError(
                f"no worker has a context {wanted:#x}: it has ended, or was never made. Those that exist: {existing}"
            )
        return wanted
    if not began:
        raise NoContext(
            "no autograd context exists. One exists inside its `with telegrad.autograd.context()` block only: wait for "
            "one with --wait SECONDS. `telegrad story` tells of those that have ended"
        )
    return max(began, key=lambda each: (began[each], each))


def graph_of(group: GroupView, context: int) -> ContextGraph:
    """Return the graph of a context as the workers of a group show it."""
    views = {view.name: each for view in group.workers for each in view.contexts if each.id == context}
    if not views:
        raise NoContext(f"context {context:#x} has just ended; try again, or choose one that exists longer")
    taking_part = {name for view in views.values() for name in view.workers}
    return join(context, views, {name: why for name, why in group.silent.items() if name in taking_part})


def _print(graph: ContextGraph) -> None:
    print(f"context {graph.context:#x}")
    rows = []
    for worker in graph.workers:
        nodes = [node for node in graph.nodes if node.worker == worker]
        kinds = [sum(node.kind == kind for node in nodes) for kind in ("op", "leaf", "send", "recv")]
        states = [f"{sum(node.state == state for node in nodes)} {state}" for state in ("waits", "runs", "done")]
        if skipped := sum(node.state == "skipped" for node in nodes):
            states.append(f"{skipped} not reached")
        known = any(node.state for node in nodes)
        rows.append([worker, *map(str, kinds), ", ".join(states) if known else graph.silent.get(worker, "")])
    print_table(["worker", "operations", "leaves", "sends", "recvs", "in the pass"], rows)
    for edge in graph.edges:
        if edge.message:
            source, target = edge.target.rpartition(":")[0], edge.source.rpartition(":")[0]
            print(one_line(f"{edge.message}: {source} -> {target}  {', '.join(edge.shapes)}".rstrip()))
    print("Draw it with -o graph.svg, or -o graph.html for a page to zoom and point at.")


def _write(graph: ContextGraph, path: Path, most: int | None) -> None:
    is_page = path.suffix == ".html"
    folded = fold(graph, most if most is not None else _PAGE_NODES if is_page else READABLE)
    path.write_text(render_page(folded) if is_page else render_graph(folded), encoding="utf-8")
    shown = f", shown as {len(folded.nodes)}" if len(folded.nodes) < len(graph.nodes) else ""
    print(f"{path}: context {graph.context:#x}, {len(graph.nodes)} nodes{shown} on {len(graph.workers)} workers.")
