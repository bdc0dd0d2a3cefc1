"""Writes a report of what is stuck as plain text, for a terminal, an error or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from telegrad.observe.model import Frame
from telegrad.observe.printable import printable
from telegrad.observe.stuck import CycleStep, StuckNode, StuckReport, count

_FRAMES = 8  # of each stack, the innermost of the user's
_INTERNAL = 3  # if there is none
_NAMES = 8


def render(report: StuckReport, *, stacks: bool = True, limit: int | None = None) -> str:
    """Return the report as text, of at most `limit` characters."""
    lines: list[str] = []
    for cycle in report.cycles:
        lines += _cycle(cycle)
    roots = [node for node in report.roots if not node.expected]
    if roots:
        number = count(roots)
        what = "1 call, pass or wait is" if number == 1 else f"{number} calls, passes and waits are"
        lines.append(f"{what} older than {report.older:g} s:" if report.older else "Calls, passes and waits:")
        for node in roots:
            lines += _node(node, "", stacks)
    elif not lines:
        lines.append(f"Nothing is older than {report.older:g} s." if report.older else "Nothing is in progress.")
    lines += _in_shutdown([node for node in report.roots if node.expected])
    lines += [f"worker {name!r} is silent: {reason}" for name, reason in report.silent.items()]
    text = printable("\n".join(lines))
    if limit is not None and len(text) > limit:
        text = text[: limit - 40].rpartition("\n")[0] + "\n(shortened; see `telegrad stuck`)"
    return text


def _cycle(cycle: Sequence[CycleStep]) -> Iterable[str]:
    yield f"WAIT CYCLE of {len(cycle)}: these wait for each other, and none can go on"
    for number, step in enumerate(cycle, start=1):
        call = f" (call {step.key[1]} of worker {step.key[0]!r})" if step.key[1] else ""
        yield f"  {number}. {step.function} on worker {step.worker!r}{call}"
        if step.where:
            yield f"       {'' if step.where.startswith('called') else 'at '}{step.where}"
        following = number % len(cycle) + 1
        yield f"       waits for {step.waits_for}: {following}."
    yield ""


def _in_shutdown(nodes: Iterable[StuckNode]) -> Iterable[str]:
    """Say once who waits in shutdown() for whom: every worker that only serves does, all the time."""
    alike: dict[tuple[str, ...], list[StuckNode]] = {}
    for node in nodes:
        alike.setdefault(node.waits or (node.title,), []).append(node)
    for waits, members in alike.items():
        names = sorted({node.key[0] if node.key is not None else node.worker for node in members})
        listed = ", ".join(map(repr, names[:_NAMES])) + (
            f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        )
        age = max(node.age for node in members)
        yield f"In shutdown() for {age:.1f} s, and serving calls meanwhile: {listed}"
        yield from (f"    {text}" for text in waits)


def _node(node: StuckNode, indent: str, stacks: bool) -> Iterable[str]:
    yield f"{indent}- {node.title}, {_times(node)}{' (shown above)' if node.repeated else ''}"
    inner = indent + "    "
    if node.where and not node.stack:
        yield f"{inner}{'' if node.where.startswith('called') else 'at '}{node.where}"
    if stacks:
        yield from (f"{inner}{line}" for line in _stack(node.stack))
    elif node.where and node.stack:
        yield f"{inner}at {node.where}"
    yield from (f"{inner}{text}" for text in node.waits)
    for child in node.children:
        yield from _node(child, inner, stacks)


def _times(node: StuckNode) -> str:
    age = f"for {node.age:.1f} s" if node.kind == "wait" else f"{node.age:.1f} s old"
    if node.left is None:
        return age
    return f"{age}, deadline in {node.left:.1f} s" if node.left >= 0.05 else f"{age}, its deadline has passed"


def _stack(stack: Sequence[Frame]) -> Iterable[str]:
    own = [frame for frame in stack if not frame.internal]
    for frame in own[-_FRAMES:] or stack[-_INTERNAL:]:
        yield f"{frame.file}:{frame.line} in {frame.function}" + (f": {frame.text}" if frame.text else "")
