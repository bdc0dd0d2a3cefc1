"""The live view: what fits on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from telegrad.observe.commands import top
from telegrad.observe.model import GroupView, LiveCall, WorkerView


def group(workers: int, *calls: LiveCall) -> GroupView:
    views = [
        WorkerView(f"worker{number}", number, 1, 0, "host", 1, (), 100.0, 0.0, 0.0, made=calls if number == 0 else ())
        for number in range(workers)
    ]
    return GroupView(tuple(views))


def screen(view: GroupView, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(top._rich(view, None, (width, height)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    return text.splitlines()


def test_no_cell_is_cut_on_a_narrow_terminal() -> None:
    lines = screen(group(3), 80, 40)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    for name in top.HEAD:
        assert [line for line in lines if name in line]


def test_a_wide_terminal_has_one_table() -> None:
    assert sum(line.startswith("worker ") for line in screen(group(3), 200, 40)) == 1


def test_a_group_that_is_too_large_for_the_terminal_leaves_room_for_the_oldest_calls() -> None:
    call = LiveCall(7, "worker0", "worker1", "train:step", 40.0, state="sent", where="/home/me/train.py:17 in step")
    lines = screen(group(100, call), 80, 24)
    assert len(lines) <= 24
    assert "100 workers" in lines[0]
    assert "not shown" in lines[0]
    assert any("1:00" in line and "train:step" in line and "train.py:17 in step" in line for line in lines)


def test_a_worker_that_only_serves_has_no_old_call() -> None:
    waiting = LiveCall(1, "worker0", "worker1", "a collective", 10.0, state="sent")
    assert top.calls(group(2, waiting)) == []
    assert top.cells(top.rows(group(2, waiting))[0])[top.HEAD.index("oldest")] == "-"
