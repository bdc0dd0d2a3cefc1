"""Draws a trace as an SVG picture, for documents and for terminals without a browser.

Each thread is one row, and what is nested is painted over what it is in: so a row shows what its thread did at any
time. Or each worker is one row, which shows what any of its threads did: then a gap is time that the worker lost. Text
is not measured, so the same trace gives the same bytes everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from telegrad.observe.printable import escape_xml

TraceEvent = dict[str, Any]

LOOKS = {
    "forward": ("#3b76b5", "#ffffff", "function that was called"),
    "backward": ("#d9602b", "#ffffff", "backward pass (island)"),
    "step": ("#3f8f5b", "#ffffff", "optimizer step"),
    "serialise": ("#8561c5", "#ffffff", "serialise"),
    "transfer": ("#e3b341", "#3a2c00", "transfer"),
    "wait": ("url(#wait)", "#52606d", "wait"),
}
"""How the states of a worker are shown: fill, ink, and what the legend says."""

_ARROWS = {"request": "#52606d", "reply": "#9aa5b1", "gradient": "#b5380e"}
_INK, _FAINT = "#1f2933", "#7b8794"
_FONT = "Verdana, 'DejaVu Sans', Arial, Helvetica, sans-serif"
_GUTTER, _TOP, _ROW, _GAP, _LEGEND = 110, 54, 19, 12, 34
_MOST_ARROWS = 600
_THREAD = re.compile(r"thread \d+|serving|islands")
_Track = tuple[int, int]


class _Slice(msgspec.Struct, frozen=True):
    """Something that a thread did."""

    began: float
    ended: float
    name: str
    look: str


class _Drawing(msgspec.Struct):
    """What is drawn where: the slices of each row, and the place of each row."""

    workers: dict[int, str]
    rows: dict[_Track, list[_Slice]]
    tops: dict[_Track, float]
    bottom: float
    began: float
    ended: float
    width: int

    def x(self, time: float) -> float:
        """Return where a time is, in the picture."""
        share = (time - self.began) / (self.ended - self.began)
        return _GUTTER + min(max(share, 0.0), 1.0) * (self.width - _GUTTER - 16)


def render_trace(
    events: Iterable[TraceEvent],
    *,
    title: str = "",
    width: int = 1200,
    window: tuple[float, float] | None = None,
    arrows: Sequence[str] = ("request", "gradient"),
    merged: bool = False,
) -> str:
    """Return a picture of the events of a trace. `merged`: with one row for each worker, not for each thread.

    `window` is a time from and to, in microseconds of the trace. `arrows` are the kinds of messages to show.
    """
    events = list(events)
    workers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {track: flatten(slices) for track, slices in _threads(events).items()}
    flows = [event for event in events if event["ph"] in "stf" and event["name"] in arrows]
    if merged:
        rows, flows = _merge(rows), [{**event, "tid": 0} for event in flows if (event["pid"], event["tid"]) in rows]
    drawing = _arrange(workers, rows, width, window)
    parts = [*_background(drawing), *_axis(drawing)]
    for place, slices in drawing.rows.items():
        parts += _row(drawing, drawing.tops[place], slices)
    parts += _flows(drawing, flows)
    parts += _legend(drawing, arrows)
    height = round(drawing.bottom + _LEGEND)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="{_FONT}" role="img">',
            f"<title>{escape_xml(title or 'A trace of all workers')}</title>",
            '<defs><pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="5" height="5" fill="#f0f2f5"/>'
            '<line x1="0" y1="0" x2="0" y2="5" stroke="#b8c2cc" stroke-width="2"/></pattern></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            _text(16, 22, title, size=14, bold=True),
            *parts,
            "</svg>\n",
        ]
    )


def _look(event: TraceEvent) -> str:
    """Return how a slice is shown; empty for one that only holds others."""
    category, name = event["cat"], event["name"]
    if category == "compute":
        return "backward" if name.startswith(("island", "probe")) else "step" if name.startswith("step") else "forward"
    return category if category in LOOKS else ""


def _threads(events: list[TraceEvent]) -> dict[_Track, list[_Slice]]:
    """Return what threads did. Calls that nobody waited for are on further tracks, which are left out."""
    named = [event for event in events if event["name"] == "thread_name"]
    shown = {(event["pid"], event["tid"]) for event in named if _THREAD.fullmatch(event["args"]["name"])}
    rows: dict[_Track, list[_Slice]] = {}
    around: dict[_Track, list[tuple[_Slice, bool]]] = {}  # with whether it is a call that is answered later
    slices = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in shown]
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        track = event["pid"], event["tid"]
        ended = event["ts"] + event["dur"]
        outer = around.setdefault(track, [])
        while outer and outer[-1][0].ended <= event["ts"]:
            outer.pop()
        # A part of a call is named after its stage. Who looks wants to know the function: the name of what it is in.
        look, name = _look(event), event["name"]
        if look == "wait" and outer and outer[-1][1]:
            continue  # no thread waits, as the summary says
        if look == "forward" and outer:
            name = outer[-1][0].name.partition(" ")[2]
        shown_slice = _Slice(event["ts"], ended, name, look)
        outer.append((shown_slice, bool(event.get("args", {}).get("deferred"))))
        rows.setdefault(track, []).append(shown_slice)
    return rows


def flatten(slices: list[_Slice]) -> list[_Slice]:
    """Return what is innermost at any time, of slices that are nested or apart."""
    flat: list[_Slice] = []
    around: list[_Slice] = []
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        while around and at < time:
            inner = around[-1]
            end = min(time, inner.ended)
            if end > at:
                flat.append(_Slice(at, end, inner.name, inner.look))
                at = end
            if inner.ended <= time:
                around.pop()
        at = max(at, time)

    for each in sorted(slices, key=lambda each: (each.began, -each.ended)):
        until(each.began)
        around.append(each)
    until(max((each.ended for each in slices), default=0.0))
    return flat


def _merge(rows: dict[_Track, list[_Slice]]) -> dict[_Track, list[_Slice]]:
    """Return one row for each worker. Where its threads did several things, the most important is painted last."""
    order = ["", *reversed(LOOKS)]
    merged: dict[_Track, list[_Slice]] = {}
    for (worker, _), slices in sorted(rows.items()):
        merged.setdefault((worker, 0), []).extend(slices)
    return {
        track: sorted(slices, key=lambda each: (order.index(each.look), each.began)) for track, slices in merged.items()
    }


def _arrange(
    workers: dict[int, str], rows: dict[_Track, list[_Slice]], width: int, window: tuple[float, float] | None
) -> _Drawing:
    if window is None:
        times = [time for slices in rows.values() for each in slices for time in (each.began, each.ended)]
        window = (min(times), max(times)) if times else (0.0, 1.0)
    tops: dict[_Track, float] = {}
    top = float(_TOP)
    for worker in workers:
        for track in [track for track in sorted(rows) if track[0] == worker] or [(worker, 0)]:
            tops[track] = top
            top += _ROW
        top += _GAP
    return _Drawing(workers, rows, tops, top, window[0], max(window[1], window[0] + 1e-3), width)


def _background(drawing: _Drawing) -> list[str]:
    parts = []
    right = drawing.width - 16
    for worker, name in drawing.workers.items():
        tops = [top for place, top in drawing.tops.items() if place[0] == worker]
        top, height = min(tops) - 3, len(tops) * _ROW + 4
        parts.append(
            f'<rect x="{_GUTTER}" y="{top:g}" width="{right - _GUTTER}" height="{height}" rx="3" fill="#f7f8fa"/>'
        )
        shown = name if len(name) <= 14 else name[:13] + "…"
        parts.append(_text(_GUTTER - 10, top + height / 2 + 4, shown, bold=True, at="end"))
    return parts


def _axis(drawing: _Drawing) -> list[str]:
    """Return lines at round times, counted from the left border."""
    length = drawing.ended - drawing.began
    step = 10 ** math.floor(math.log10(length))
    step = next(each for each in (step / 5, step / 2, step, step * 2) if length / each <= 10)
    parts = []
    for number in range(int(length / step) + 1):
        x, time = drawing.x(drawing.began + number * step), number * step
        text = f"{time / 1e6:g} s" if length >= 2e6 else f"{time / 1e3:g} ms" if length >= 2e3 else f"{time:g} µs"
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 12}" x2="{x:.1f}" y2="{drawing.bottom - _GAP:g}" stroke="#e4e7eb"/>'
        )
        parts.append(_text(x, _TOP - 16, text, size=10, ink=_FAINT))
    return parts


def _row(drawing: _Drawing, top: float, slices: list[_Slice]) -> list[str]:
    parts, tiny = [], set()
    for each in slices:
        if not each.look or each.ended <= drawing.began or each.began >= drawing.ended:
            continue
        left, right = drawing.x(each.began), drawing.x(each.ended)
        if right - left < 0.5:  # many would be painted on the same place
            if (round(left * 2), each.look) in tiny:
                continue
            tiny.add((round(left * 2), each.look))
        fill, ink, _ = LOOKS[each.look]
        apart = ' stroke="#ffffff" stroke-width="0.8"' if right - left > 4 and each.look != "wait" else ""
        box = f'x="{left:.2f}" y="{top:g}" width="{max(right - left, 0.4):.2f}" height="{_ROW - 3}"'
        parts.append(f'<rect {box} fill="{fill}"{apart}/>')
        room = int((right - left - 6) / 5.8)
        if each.look in ("forward", "backward", "step") and room >= min(len(each.name), 8):
            name = each.name if len(each.name) <= room else each.name[: room - 1] + "…"
            parts.append(_text(left + 4, top + 12, name, size=9.5, ink=ink, at="start"))
    return parts


def _flows(drawing: _Drawing, events: list[TraceEvent]) -> list[str]:
    """Return a line for each message, from its first to its last point."""
    flows: dict[int, list[TraceEvent]] = {}
    for event in events:
        flows.setdefault(event["id"], []).append(event)
    parts = []
    for points in list(flows.values())[:_MOST_ARROWS]:
        ends = [point for point in points if (point["pid"], point["tid"]) in drawing.tops]
        if len(ends) < 2 or ends[-1]["ts"] < drawing.began or ends[0]["ts"] > drawing.ended:
            continue
        first, last = ends[0], ends[-1]
        ink = _ARROWS[first["name"]]
        place = [drawing.tops[end["pid"], end["tid"]] + _ROW / 2 - 1 for end in (first, last)]
        x = drawing.x(first["ts"]), drawing.x(last["ts"])
        parts.append(
            f'<line x1="{x[0]:.1f}" y1="{place[0]:g}" x2="{x[1]:.1f}" y2="{place[1]:g}" stroke="{ink}" '
            f'stroke-width="0.9" opacity="0.75"/><circle cx="{x[1]:.1f}" cy="{place[1]:g}" r="2" fill="{ink}"/>'
        )
    return parts


def _legend(drawing: _Drawing, arrows: Sequence[str]) -> list[str]:
    parts, x, y = [], float(_GUTTER), drawing.bottom + 10
    for fill, _, words in LOOKS.values():
        parts.append(f'<rect x="{x:g}" y="{y - 9:g}" width="16" height="11" fill="{fill}"/>')
        parts.append(_text(x + 22, y, words, size=11, at="start"))
        x += 44 + 6.6 * len(words)
    for name in arrows:
        parts.append(f'<line x1="{x:g}" y1="{y - 4:g}" x2="{x + 18:g}" y2="{y - 4:g}" stroke="{_ARROWS[name]}"/>')
        parts.append(f'<circle cx="{x + 18:g}" cy="{y - 4:g}" r="2.4" fill="{_ARROWS[name]}"/>')
        parts.append(_text(x + 26, y, name, size=11, at="start"))
        x += 48 + 6.6 * len(name)
    return parts


def _text(
    x: float, y: float, words: str, *, size: float = 12, ink: str = _INK, bold: bool = False, at: str = ""
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = at or ("start" if bold else "middle")
    return (
        f'<text x="{x:.1f}" y="{y:g}" font-size="{size:g}" fill="{ink}" text-anchor="{anchor}"{weight}>'
        f"{escape_xml(words)}</text>"
    )
