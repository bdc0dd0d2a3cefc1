"""Draws the results of `everything.py`: each case's time relative to torch, and time over message size.

    python benchmarks/draw.py [--json FILE] [--picture FILE]

The picture depends only on the figures: a test compares the committed picture with the committed figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "latest.json"
PICTURE = ROOT / "docs" / "benchmarks.svg"
sys.path.append(str(ROOT / "docs"))

from drawing import ACK, BAD, FAINT, GRADIENT, INK, Picture  # noqa: E402 - after its folder is on sys.path

WIDTH = 860
GRID, UNIX, TCP = "#e4e7eb", GRADIENT, "#f2b08c"
TRANSPORTS = {"unix": ("one host: unix, shared memory", UNIX), "tcp": ("TCP", TCP)}
GROUPS = {
    "calls.py": (
        "Calls",
        {
            "noop": "no-op function",
            "echo": "16 floats, round trip",
            "add": "torch.add of 16 floats",
            "async": "500 calls in flight",
            "1KB": "1 KB, round trip",
            "16KB": "16 KB",
            "64KB": "64 KB",
            "256KB": "256 KB",
            "1MB": "1 MB",
            "4MB": "4 MB",
            "16MB": "16 MB",
            "64MB": "64 MB",
        },
    ),
    "backward.py": (
        "Backward passes",
        {
            "hop1": "one hop, 1 matmul",
            "hop64": "one hop, 64 matmuls",
            "context": "context, forward, backward, exit",
            "chain8": "chain of 8 calls, both ways",
            "16MB": "16 MB, forward and backward",
            "local": "3,000 nodes, one worker *",
        },
    ),
    "training.py": (
        "Training",
        {
            "server": "parameter server, 4 trainers",
            "pipeline": "pipeline of 3 stages",
            "remote": "remote() and to_here()",
            "proxy": "method of a remote object",
        },
    ),
}
"""A heading and the labels of the cases, by program."""
LINES = {"torch": (ACK, ""), "telegrad": (GRADIENT, ""), "raw socket": (FAINT, "5 4")}

Runs = Mapping[tuple[str, str], Mapping[str, Any]]
"""The cases, by program and transport."""


def draw(figures: Mapping[str, Any]) -> Picture:
    """Draw the whole picture."""
    runs = {(run["program"], run["transport"]): run["cases"] for run in figures["runs"]}
    curves = [transport for transport in TRANSPORTS if len(_sizes(runs.get(("calls.py", transport), {}))) > 1]
    others = runs.get(("others.py", "unix"), {})
    notes = _notes(figures)
    bars_end = 92 + 24 * sum(len(cases) + 1 for cases in _by_group(runs).values())
    curves_end = bars_end + (320 if curves else 0)
    others_end = curves_end + (76 + 20 * len(others) if others else 0)
    height = others_end + 36 + 17 * len(notes)
    picture = Picture(WIDTH, height, "telegrad compared with torch.distributed.rpc")
    _bars(picture, runs, 92, bars_end)
    for number, transport in enumerate(curves):
        _curves(picture, runs["calls.py", transport], transport, 66 + number * 420, bars_end + 70, curves)
    if others:
        _table(picture, others, curves_end + 36)
    for number, (words, ink) in enumerate(notes):
        picture.text(20, others_end + 36 + 17 * number, words, size=11, ink=ink, at="start")
    return picture


# -- time relative to torch -----------------------------------------------------------------------------------


def _bars(picture: Picture, runs: Runs, top: float, bottom: float) -> None:
    left, right, most = 262.0, 592.0, 1.25

    def place(ratio: float) -> float:
        return left + min(ratio, most) / most * (right - left)

    picture.text(20, 28, "Time relative to torch (torch = 1)", size=15, bold=True, at="start")
    picture.text(20, 46, "ratio of medians; lower is faster; black ticks are targets", size=11, ink=FAINT, at="start")
    for number, (words, ink) in enumerate(TRANSPORTS.values()):
        picture.block(20 + 230 * number, 56, 12, 9, ink)
        picture.text(38 + 230 * number, 65, words, size=11, at="start")
        picture.text(710 + 130 * number, 78, ("unix", "tcp")[number], size=11, bold=True, at="end")
    for ratio in (0, 0.25, 0.5, 0.75, 1.0):
        picture.stroke((place(ratio), 84), (place(ratio), bottom), ink=FAINT if ratio == 1 else GRID, thick=1)
        picture.text(place(ratio), 78, f"{ratio:g}", size=11, ink=FAINT)
    y = top
    for program, cases in _by_group(runs).items():
        heading, names = GROUPS[program]
        picture.text(20, y + 16, heading, size=12, bold=True, at="start")
        y += 24
        for case in cases:
            picture.text(32, y + 15, names.get(case, case), size=12, at="start")
            for number, (transport, (_, ink)) in enumerate(TRANSPORTS.items()):
                found = runs.get((program, transport), {}).get(case)
                if found is None:
                    continue
                ratio, target = found["ratio"], found["targets"].get("torch")
                bar = y + 2 + 9 * number
                picture.block(left, bar, place(ratio) - left, 8, ink)
                if ratio > most:
                    picture.text(right + 4, bar + 8, "…", size=11, ink=FAINT, at="start")
                if target is not None:
                    picture.block(place(target) - 1, bar - 1, 2, 10, INK)
                missed = target is not None and round(ratio, 2) > target
                goal = "" if target is None else f" (≤ {target:.2f})"
                picture.text(
                    710 + 130 * number, y + 15, f"{ratio:.2f}{goal}", size=11, ink=BAD if missed else INK, at="end"
                )
            y += 24


def _by_group(runs: Runs) -> dict[str, list[str]]:
    """Return the cases that were measured over any transport, by program, in order."""
    found: dict[str, dict[str, None]] = {}
    for program in GROUPS:
        for (ran, _), cases in runs.items():
            if ran == program:
                found.setdefault(program, {}).update(dict.fromkeys(cases))
    return {program: list(cases) for program, cases in found.items()}


# -- time over message size -----------------------------------------------------------------------------------


def _curves(
    picture: Picture, cases: Mapping[str, Any], transport: str, left: float, top: float, titled: Sequence[str]
) -> None:
    width, height = 350.0, 200.0
    sizes = _sizes(cases)
    medians = {
        system: [(size, cases[name]["systems"][system]["median"]) for name, size in sizes.items()]
        for system in LINES
        if all(system in cases[name]["systems"] for name in sizes)
    }
    times = [seconds for points in medians.values() for _, seconds in points]
    across = logarithmic(min(sizes.values()), max(sizes.values()), left, left + width)
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))
    up = logarithmic(low, high, top + height, top)
    if transport == titled[0]:
        picture.text(20, top - 38, "Round trip of a tensor, by size", size=15, bold=True, at="start")
    picture.text(left, top - 12, TRANSPORTS[transport][0], size=12, bold=True, at="start")
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = up(10.0**power)
        picture.stroke((left, y), (left + width, y), ink=GRID, thick=1)
        picture.text(left - 6, y + 4, _duration(power), size=11, ink=FAINT, at="end")
    for name, size in sizes.items():
        picture.text(across(size), top + height + 16, re.sub(r"([KM])B", r" \1B", name), size=9, ink=FAINT)
    for number, (system, points) in enumerate(medians.items()):
        ink, dash = LINES[system]
        picture.stroke(*((across(size), up(seconds)) for size, seconds in points), ink=ink, thick=2, dash=dash)
        for size, seconds in points:
            picture.dot(across(size), up(seconds), ink)
        picture.stroke(
            (left + number * 100, top + 236), (left + number * 100 + 20, top + 236), ink=ink, thick=2, dash=dash
        )
        picture.text(left + number * 100 + 26, top + 240, system, size=11, at="start")


def _sizes(cases: Mapping[str, Any]) -> dict[str, int]:
    """Return the size in bytes of each case that is named by a size."""
    units = {"KB": 1 << 10, "MB": 1 << 20}
    found = {name: re.fullmatch(r"(\d+)(KB|MB)", name) for name in cases}
    return {name: int(match[1]) * units[match[2]] for name, match in found.items() if match}


def logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function that maps values between `low` and `high` to places between `start` and `end`."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def _duration(power: int) -> str:
    """Format a power of ten of a second.

    >>> [_duration(power) for power in (-6, -4, -2, 0)]
    ['1 µs', '100 µs', '10 ms', '1 s']
    """
    unit = power // 3
    return f"{10 ** (power - 3 * unit)} {({-3: 'ns', -2: 'µs', -1: 'ms', 0: 's', 1: 'ks'})[unit]}"


# -- other systems --------------------------------------------------------------------------------------------


def _table(picture: Picture, cases: Mapping[str, Any], top: float) -> None:
    picture.text(20, top, "Other systems: medians, on one host", size=15, bold=True, at="start")
    systems = list(next(iter(cases.values()))["systems"])
    columns = {system: 420 + 120 * number for number, system in enumerate(systems)}
    for system, x in columns.items():
        picture.text(x, top + 24, system, size=11, bold=True, at="end")
    for number, (case, found) in enumerate(cases.items()):
        y = top + 46 + 20 * number
        picture.text(32, y, GROUPS["calls.py"][1].get(case, case), size=12, at="start")
        for system, x in columns.items():
            ink = GRADIENT if system == "telegrad" else INK
            picture.text(x, y, f"{found['systems'][system]['median'] * 1e6:,.0f} µs", size=11, ink=ink, at="end")


# -- footnotes ------------------------------------------------------------------------------------------------


def _notes(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return notes on the figures, each with its colour."""
    machine, settings = figures["machine"], figures["settings"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "telegrad"))
    notes = [
        ("* against plain loss.backward() in one process", FAINT),
        (
            f"{figures['date']}: {machine['processor']}, {machine['cores']} cores, {machine['memory']}; "
            f"Linux {machine['kernel']}; {versions}",
            FAINT,
        ),
        (f"Medians over {settings['blocks']} blocks of each system, alternating.", FAINT),
    ]
    notes += [(f"{title} did not finish: its figures are missing.", BAD) for title in figures["failed"]]
    if settings["quick"]:
        notes.append(("A quick run with a tenth of the iterations: it shows that everything works, no more.", BAD))
    load = float(machine["load"].split()[0])
    if load > machine["cores"] / 2:
        notes.append((f"The machine was busy before the run began (load {load:g}): do not rely on these figures.", BAD))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture as a command."""
    parser = argparse.ArgumentParser(description="Draw the figures that everything.py has written.")
    parser.add_argument("--json", type=Path, default=FIGURES, metavar="FILE", help="the figures (%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="the picture (%(default)s)")
    options = parser.parse_args(arguments)
    options.picture.write_text(draw(json.loads(options.json.read_text())).svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
