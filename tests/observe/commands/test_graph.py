from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.support.observed_group import here, observed_group, open_context, scaled
from tests.support.recorded_groups import worker_view

from telegrad.cli import main
from telegrad.errors import TelegradError
from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands import graph
from telegrad.observe.commands.graph import choose, graph_of
from telegrad.observe.model import ContextView, GroupView


@pytest.fixture
def shown() -> Iterator[int]:
    """Make a call in a context, and yield its id."""
    with observed_group() as group, open_context(group["a"]) as context:
        group["a"].call("b", scaled, (torch.ones(3, requires_grad=True),))
        yield context.id


def test_a_context_is_described(shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *here()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"context {shown:#x}"
    assert [line.split() for line in lines[2:4]] == [["a", "0", "1", "1", "1"], ["b", "2", "1", "1", "1"]]
    assert lines[4:6] == ["m1: a -> b  float32[3]", "m2: b -> a  float32[3]"]


@pytest.mark.parametrize(("name", "beginning"), [("graph.svg", "<svg"), ("graph.html", "<!doctype html>")])
def test_a_context_is_drawn(
    shown: int, name: str, beginning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", hex(shown), "-o", str(tmp_path / name), *here()]) == 0
    assert capsys.readouterr().out == f"{tmp_path / name}: context {shown:#x}, 8 nodes on 2 workers.\n"
    text = (tmp_path / name).read_text()
    assert text.startswith(beginning)
    assert "send m1" in text
    assert "Tanh" in text


@pytest.mark.usefixtures("shown")
def test_chains_beyond_the_wanted_number_are_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.svg"
    assert main(["graph", "-o", str(path), "--nodes", "6", *here()]) == 0
    assert "8 nodes, shown as" in capsys.readouterr().out
    assert "Tanh … Mul" in path.read_text()


def test_the_graph_is_printed_as_json(shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "--json", *here()]) == 0
    graph = json.loads(capsys.readouterr().out)
    assert graph["context"] == shown
    assert {node["kind"] for node in graph["nodes"]} == {"leaf", "op", "recv", "send"}
    assert len(graph["edges"]) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seven"], "'seven' is no id of a context, such as 0x1a2b"),
        (["-o", "graph.png"], "the output ends with .svg or .html, unlike 'graph.png'"),
    ],
)
def test_a_mistake_is_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_latest_context_is_chosen_by_one_clock() -> None:
    views = (
        worker_view("a", 0, contexts=(ContextView(1, 1000.0), ContextView(2, 1001.0))),
        worker_view("b", 1, contexts=(ContextView(1, 5.0), ContextView(3, 7.0))),
    )
    group = GroupView(views, offsets={"a": -1000.0, "b": -4.0})
    assert choose(group, None) == 3
    assert choose(group, 1) == 1
    with pytest.raises(TelegradError, match=r"no worker has a context 0x9: .* Those that exist: 0x1, 0x2, 0x3"):
        choose(group, 9)
    with pytest.raises(TelegradError, match=r"no autograd context exists\..*--wait"):
        choose(GroupView((worker_view("a"),)), None)


class Coming:
    """A group in which a context exists from the third look on."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self, request: AttachRequest) -> GroupView:
        self.looks += 1
        contexts = (ContextView(5, 1.0),) if self.looks >= 3 else ()
        return GroupView((worker_view("a", 0, contexts=contexts),))


def test_it_waits_for_a_context_that_does_not_exist_yet() -> None:
    assert graph._find(cast(Attached, Coming()), None, 60.0, 1.0).context == 5
    with pytest.raises(TelegradError, match="no autograd context exists"):
        graph._find(cast(Attached, Coming()), None, 0.0, 1.0)
    with pytest.raises(TelegradError, match="no worker has a context 0x5"):
        graph._find(cast(Attached, Coming()), 5, 60.0, 1.0)


def test_workers_that_did_not_answer_are_named_if_they_take_part() -> None:
    view = worker_view("a", contexts=(ContextView(1, 0.0, workers=("b",)),))
    graph = graph_of(GroupView((view,), silent={"b": "it is lost", "c": "it is lost"}), 1)
    assert graph.silent == {"b": "it is lost"}
    with pytest.raises(TelegradError, match="has just ended"):
        graph_of(GroupView((view,)), 2)
