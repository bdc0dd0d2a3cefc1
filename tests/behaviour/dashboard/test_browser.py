"""The dashboard of a running group in a headless Chromium: opened, clicked, and looked at.

Takes the screenshots of docs/dashboard.md if TELEGRAD_TEST_PICTURES is set.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.browser import Browser, browser, is_installed
from tests.support.one_process import Group
from tests.support.paths import ROOT

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded, TelegradError
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.dashboard.server import Server
from telegrad.observe.dashboard.source import Source
from telegrad.observe.gather import gather
from telegrad.observe.model import EventPosition, GroupView
from telegrad.testing.group import local_group

pytestmark = pytest.mark.skipif(
    not os.environ.get("TELEGRAD_TEST_BROWSER") or not is_installed(),
    reason="needs chromium and chromedriver; run `make test-browser`",
)

STUCK_AFTER = 0.5
hold, reached = threading.Event(), threading.Event()


class Encoder:
    """Runs on a worker of its own. Its second output is never used."""

    def __init__(self) -> None:
        self.weight = torch.ones(16, 16, requires_grad=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = rpc.rpc_sync("decoder", decode, (x @ self.weight,))
        return hidden, x * 2


class Actor:
    """Its calls run one at a time."""

    def call(self, me: rpc.RRef) -> None:
        me.rpc_sync(timeout=60).done()

    def done(self) -> None:
        pass


encoder = Encoder()


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return encoder.forward(x)


def decode(x: torch.Tensor) -> torch.Tensor:
    return Slow.apply(x).relu()  # type: ignore[no-untyped-call]


def wait_forever() -> None:
    reached.set()
    assert hold.wait(60)


class Slow(torch.autograd.Function):
    """Waits in its backward until the test has seen it."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert hold.wait(60)
        return grad


@pytest.fixture
def group() -> Iterator[Group]:
    hold.clear()
    reached.clear()
    with local_group(["trainer", "encoder", "decoder"]) as agents:
        with acting_as(agents["trainer"]):
            yield agents
        hold.set()


@pytest.fixture
def page(group: Group) -> Iterator[Browser]:
    source = Source(partial(gather, group["trainer"]), STUCK_AFTER)
    server = Server(Feed(source.look, source.stuck, 0.2))
    server.start()
    try:
        with browser() as window:
            window.open(server.url)
            window.until(lambda: window.count(".workers tbody tr") == 3, "three workers are listed")
            yield window
            assert window.problems() == []
    finally:
        hold.set()
        server.close()


def picture(page: Browser, name: str) -> None:
    """Keep what the page shows, if the pictures of the docs are to be made."""
    if os.environ.get("TELEGRAD_TEST_PICTURES"):
        page.screenshot(ROOT / "docs" / "pictures" / f"{name}.png")


def in_thread(group: Group, function: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with acting_as(group["trainer"]):
            function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def train() -> None:
    x = torch.ones(8, 16, requires_grad=True)
    with autograd.context() as context:
        used, _ = rpc.rpc_sync("encoder", encode, (x,))
        context.backward(used.sum(), timeout=60)


def states(page: Browser) -> list[str]:
    found = page.run("return [...document.querySelectorAll('.edge-group')].map((each) => each.getAttribute('class'))")
    return [str(each).removeprefix("edge-group ") for each in found]


def test_a_pass_with_an_unused_output_is_watched_from_start_to_end(group: Group, page: Browser) -> None:
    page.click("#tab-passes")
    thread = in_thread(group, train)
    assert reached.wait(30)
    page.until(lambda: "backward" in page.text(".stage .pill"), "the pass runs")
    # The gradients of what came back last flow first. Those beyond the function that waits have not.
    page.until(lambda: states(page).count("idle") == 2, "edges wait for their gradients")
    page.until(lambda: set(states(page)) & {"flowing", "done"}, "gradients have flowed")
    assert page.text(".part .worker")
    picture(page, "dashboard-pass-runs")
    hold.set()
    thread.join(30)
    page.until(lambda: page.text(".stage .pill") == "done", "the pass is over")
    page.run("const time = document.querySelector('.time'); time.value = 1000; time.dispatchEvent(new Event('input'))")
    # One message to the encoder and back, one to the decoder and back. Of the reply to the trainer one tensor is used.
    page.until(lambda: sorted(states(page)) == ["done"] * 4, f"all edges are lit: {states(page)}")
    assert page.count(".stage svg .lane") == 3


def test_a_message_whose_tensors_are_not_used_is_drawn_as_unused(group: Group, page: Browser) -> None:
    hold.set()
    page.click("#tab-passes")

    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            used = rpc.rpc_sync("decoder", decode, (x,))
            rpc.rpc_sync("encoder", torch.mul, (x, 3))
            context.backward(used.sum(), timeout=60)
            assert done.wait(30)

    done = threading.Event()
    thread = in_thread(group, program)
    page.until(lambda: page.text(".stage .pill") == "done", "the pass is over")
    page.run("const time = document.querySelector('.time'); time.value = 1000; time.dispatchEvent(new Event('input'))")
    page.until(lambda: sorted(states(page)) == ["done", "done", "unused", "unused"], f"two are unused: {states(page)}")
    assert "unused" in page.text("main table")
    done.set()
    thread.join(30)


def test_a_stuck_call_is_found_with_its_line(group: Group, page: Browser) -> None:
    thread = in_thread(group, lambda: rpc.rpc_sync("encoder", wait_forever, timeout=60))
    page.until(lambda: page.text("#tab-stuck .badge") == "1", "the tab tells that something is stuck")
    page.click("#tab-stuck")
    page.until(lambda: "wait_forever" in page.text(".stuck-title"), "its name is shown")
    page.until(lambda: page.count(".stack") > 0, "its stack is shown")
    page.click(".stack summary")
    assert Path(__file__).name in page.text(".stuck-tree")
    assert "hold.wait" in page.text(".stack")
    page.click("#tab-calls")
    page.until(lambda: "wait_forever" in page.text("main tbody"), "it is among the live calls")
    hold.set()
    thread.join(30)
    page.until(lambda: "No call is waiting" in page.text("main"), "it has ended")
    page.click("#tab-stuck")
    page.until(lambda: "Nothing has waited" in page.text("main"), "nothing is stuck any more")


def test_a_cycle_is_named(group: Group, page: Browser) -> None:
    def program() -> None:
        actor = rpc.remote("encoder", Actor, ordered=True)
        with pytest.raises(DeadlineExceeded):
            actor.rpc_sync(timeout=6).call(actor)

    thread = in_thread(group, program)
    page.click("#tab-stuck")
    page.until(lambda: page.count(".cycle-panel li") >= 1, "the cycle is shown")
    assert "Actor.call" in page.text(".cycle-panel")
    page.until(lambda: page.count(".stuck-tree .cycle") >= 1, "the calls of the cycle are in the tree")
    picture(page, "dashboard-stuck")
    thread.join(30)


def test_a_training_is_seen_in_overview_calls_and_timeline(group: Group, page: Browser) -> None:
    hold.set()
    over = threading.Event()

    def program() -> None:
        while not over.is_set():
            train()
            rpc.rpc_sync("decoder", time.sleep, (0.02,))

    page.press("body", "d")
    thread = in_thread(group, program)
    page.until(lambda: page.text(".tile:nth-child(2) .tile-value") not in ("", "0/s"), "calls are counted")
    wait_for_points(page, 24 if os.environ.get("TELEGRAD_TEST_PICTURES") else 1)
    picture(page, "dashboard-overview")
    page.click("#tab-calls")
    page.until(lambda: "encode" in page.text("main section:nth-of-type(2)"), "the functions are listed")
    page.click("#tab-timeline")
    page.press("canvas.timeline", "++")
    for kind in ("call", "serve", "pass"):
        page.until(lambda kind=kind: page.run(HAS_COLOR, f"--{kind}"), f"a {kind} is drawn")  # type: ignore[misc]
    page.press("canvas.timeline", "\ue012")  # left: the picture stands still
    picture(page, "dashboard-timeline")
    over.set()
    thread.join(30)


def wait_for_points(page: Browser, count: int) -> None:
    def points() -> int:
        return int(page.run("return import('/page/store.js').then((module) => module.store.points.length)"))

    page.until(lambda: points() >= count, "the plots have points", 100)


HAS_COLOR = """
const canvas = document.querySelector("canvas.timeline");
const probe = document.createElement("canvas").getContext("2d");
probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(arguments[0]);
probe.fillRect(0, 0, 1, 1);
const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
for (let at = 0; at < data.length; at += 4) if (data[at] === r && data[at + 1] === g && data[at + 2] === b) return true;
return false;
"""
"""Whether the timeline has the colour of a kind of span."""


def test_names_from_workers_are_text(group: Group, page: Browser) -> None:
    name = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    group["encoder"].register(name, wait_forever)
    thread = in_thread(group, lambda: group["trainer"].call("encoder", "@" + name, timeout=60))
    assert reached.wait(30)
    for tab in ("calls", "timeline", "stuck", "overview"):
        page.click(f"#tab-{tab}")
        if tab in ("calls", "stuck"):
            page.until(lambda: "<img src=x" in page.text("main"), "the name is shown as it is")
    assert "owned" not in str(page.run("return document.title"))
    assert page.count("main img") == 0
    hold.set()
    thread.join(30)


def test_the_page_is_used_with_the_keyboard_alone(group: Group, page: Browser) -> None:
    page.press("body", "4")
    page.until(lambda: page.count("canvas.timeline") == 1, "4 opens the timeline")
    page.press("canvas.timeline", "+++-f")
    page.press("#tab-timeline", "\ue014")  # right
    page.until(lambda: page.run("return location.hash") == "#stuck", "the arrow opens the next tab")
    theme = page.run("return document.documentElement.dataset.theme")
    page.press("body", "d")
    assert page.run("return document.documentElement.dataset.theme") != theme
    page.press("body", "1")
    page.until(lambda: page.count(".workers tbody tr") == 3, "1 opens the overview")
    page.press(".workers tbody tr", "\ue007")  # enter
    page.until(lambda: "incarnation" in page.text(".drawer"), "enter opens the details")
    page.press("#pause", "\ue007")
    page.until(lambda: page.text("#live") == "paused", "the page pauses")


def test_the_token_does_not_stay_in_the_address(group: Group, page: Browser) -> None:
    assert "token" not in page.url()
    assert page.run("return document.cookie") == ""  # scripts cannot read it


def test_a_narrow_window_shows_all_tabs(group: Group, page: Browser) -> None:
    page.resize(500, 900)
    page.until(
        lambda: page.run(
            "return [...document.querySelectorAll('.tabs a')].every((tab) => {"
            "  const box = tab.getBoundingClientRect();"
            "  const top = document.elementFromPoint(box.x + 20, box.y + 10);"
            "  return box.left >= 0 && box.right <= innerWidth && tab.contains(top);"
            "})"
        ),
        "every tab is inside the window, and nothing covers it",
    )


def test_a_group_that_has_ended_is_not_shown_as_live() -> None:
    ended = threading.Event()
    with local_group(["a", "b"]) as agents:

        def look(since: Mapping[str, EventPosition]) -> GroupView:
            if ended.is_set():
                raise TelegradError("nobody can be reached")
            return source.look(since)

        source = Source(partial(gather, agents["a"]))
        server = Server(Feed(look, source.stuck, 0.2))
        server.start()
        try:
            with browser() as window:
                window.open(server.url)
                window.until(lambda: window.text("#live") == "live", "the group is seen")
                ended.set()
                window.until(lambda: window.text("#live") == "unseen", "the page says that it is not seen any more")
                said = window.text("#notice")
        finally:
            server.close()
    assert re.fullmatch(r"Cannot see the group: nobody can be reached\. What you see is from \d+:\d+:\d+\.", said), said


def test_a_lost_worker_has_no_value_now_and_its_reason_hides_nothing(group: Group, page: Browser) -> None:
    memory = "canvas[aria-label^='Memory']"
    page.until(
        lambda: "decoder" in str(page.run(f'return document.querySelector("{memory}").ariaLabel')), "it is drawn"
    )
    group["decoder"].shutdown_protocol.close_listeners()
    reason = "its cable was cut, " + "and nobody knows who did it, " * 10
    group["trainer"].peers.lost_workers.peer_lost(group["trainer"].peers.find("decoder"), reason)
    page.until(lambda: reason.strip() in page.text(".workers .gone"), "the reason is shown")
    page.until(
        lambda: "decoder unknown" in str(page.run(f'return document.querySelector("{memory}").ariaLabel')),
        "the plot knows no memory of it now",
    )
    assert page.run(
        "const found = document.querySelector('.workers').parentElement; return found.scrollWidth <= found.clientWidth"
    )
    page.click(".workers .gone")
    page.until(lambda: page.text(".drawer").splitlines()[-1].startswith("it is lost: its cable"), "so do the details")
