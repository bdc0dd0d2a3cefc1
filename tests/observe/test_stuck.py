"""What is stuck, from views that were made by hand."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.model import CallKey, Frame, GroupView, LiveCall, PassView, Wait, WorkerView
from telegrad.observe.stuck import StuckReport, analyze, count
from telegrad.observe.stuck_text import render

nodes = st.tuples(st.sampled_from("abc"), st.integers(1, 6))


def worker(name: str, **fields: object) -> WorkerView:
    base = WorkerView(name, ord(name[0]), 1, 0, "host", 100, (), now=50.0, wall=0.0, started=0.0)
    return msgspec.structs.replace(base, **fields)


def waiting_pair() -> GroupView:
    """f on a waits for g on b, which waits for its turn at an ordered object of a, where f runs."""
    a = worker(
        "a",
        made=(LiveCall(1, "a", "b", "m:g", 41.0, parent=("c", 7), state="sent", where="f.py:3 in f"),),
        served=(
            LiveCall(7, "c", "a", "Actor.f", 40.0, state="running", thread=9, where="f.py:3 in f"),
            LiveCall(2, "b", "a", "Actor.h", 42.0, state="queued"),
        ),
        waits=(
            Wait("reply", ("b",), 41.0, "the reply to g", 9, ("a", 1), ("c", 7)),
            Wait("queue", (), 42.0, "its turn", 0, ("c", 7), ("b", 2)),
        ),
        stacks={9: (Frame("f.py", 3, "f", "g()"), Frame("telegrad.py", 1, "wait", "", True))},
    )
    b = worker(
        "b",
        made=(LiveCall(2, "b", "a", "@telegrad.method", 42.0, parent=("a", 1), state="sent", where="g.py:5 in g"),),
        served=(LiveCall(1, "a", "b", "m:g", 41.0, state="running", where="g.py:5 in g"),),
        waits=(Wait("reply", ("a",), 42.0, "the reply to h", 0, ("b", 2), ("a", 1)),),
    )
    c = worker("c", made=(LiveCall(7, "c", "a", "m:f", 40.0, state="sent"),))
    return GroupView((a, b, c), {"d": "it did not answer in time"})


def test_a_cycle_over_an_ordered_object_is_named_with_workers_functions_and_lines() -> None:
    report = analyze(waiting_pair(), 1.0)
    (cycle,) = report.cycles
    assert {(step.worker, step.function) for step in cycle} == {("a", "Actor.f"), ("b", "m:g"), ("a", "Actor.h")}
    text = render(report)
    for expected in ("WAIT CYCLE of 3", "at f.py:3 in f", "at g.py:5 in g", "called at g.py:5 in g", "'d' is silent"):
        assert expected in text


def test_the_tree_shows_each_call_once_below_the_call_that_waits_for_it() -> None:
    report = analyze(waiting_pair(), 1.0)
    (root,) = report.roots
    assert (root.key, count(report.roots)) == (("c", 7), 3)
    assert [frame.file for frame in root.stack if not frame.internal] == ["f.py"]
    assert root.children[0].children[0].children[0].repeated


def test_what_a_worker_tells_of_the_calls_of_others_is_ignored() -> None:
    """A hostile member could otherwise end every look at the group, or hide a call."""
    told = (LiveCall(1, "nobody", "b", "lie", 41.0), LiveCall(7, "c", "a", "lie", 49.0))
    lies = (LiveCall(7, "c", "a", "lie", 49.0), LiveCall(8, "a", "nobody", "lie", 1.0))
    (a, b, c), silent = waiting_pair().workers, waiting_pair().silent
    b = msgspec.structs.replace(b, made=b.made + told, served=b.served + lies)
    assert render(analyze(GroupView((a, b, c), silent), 1.0)) == render(analyze(waiting_pair(), 1.0))


def test_what_is_younger_is_left_out() -> None:
    assert analyze(waiting_pair(), 60.0).roots == ()


def test_a_focus_shows_only_one_call_and_what_it_waits_for() -> None:
    (root,) = analyze(waiting_pair(), 0.0, ("a", 1)).roots
    assert root.function == "m:g"


def test_a_focus_on_a_call_that_has_ended_shows_all() -> None:
    assert analyze(waiting_pair(), 1.0, ("a", 99)) == analyze(waiting_pair(), 1.0)


def test_a_barrier_leads_to_what_the_missing_worker_waits_for() -> None:
    a = worker(
        "a",
        served=(LiveCall(1, "b", "a", "a collective", 40.0, state="deferred"),),
        waits=(Wait("barrier", ("c",), 40.0, "worker 'c' to join a collective", 0, None, ("b", 1)),),
    )
    c = worker("c", waits=(Wait("reply", ("b",), 41.0, "the reply to f", 5, ("c", 3)),))
    text = render(analyze(GroupView((a, c)), 1.0))
    assert "waits for worker 'c' to join a collective" in text
    assert "worker 'c' itself waits for the reply to f" in text


def test_a_cycle_of_barriers_names_the_lines_of_the_programs() -> None:
    """Worker a waits for b in one barrier, and b for a in another."""

    def waiting(name: str, other: str, line: int) -> WorkerView:
        call = LiveCall(1, name, name, "a collective", 40.0, state="deferred", where=f"train.py:{line} in <module>")
        own = Wait("reply", (name,), 40.0, "the reply to a collective", 100, (name, 1))
        barrier = Wait("barrier", (other,), 40.0, f"worker {other!r} to join a collective", 0, None, (name, 1))
        return worker(name, made=(call,), served=(msgspec.structs.replace(call, where=""),), waits=(own, barrier))

    report = analyze(GroupView((waiting("a", "b", 7), waiting("b", "a", 9))))
    assert [(step.worker, step.function, step.where) for step in report.cycles[0]] == [
        ("a", "the main thread of the program", "train.py:7 in <module>"),
        ("a", "a collective", "called at train.py:7 in <module>"),
        ("b", "the main thread of the program", "train.py:9 in <module>"),
        ("b", "a collective", "called at train.py:9 in <module>"),
    ]


def test_a_worker_whose_main_thread_computes_may_still_come_to_a_barrier() -> None:
    """Another thread of b waits for a function on a, in which a waits for b at a barrier."""

    def report_of(thread: int) -> StuckReport:
        f = LiveCall(1, "b", "a", "m:f", 40.0, state="running")
        collective = LiveCall(1, "a", "a", "a collective", 40.0, state="deferred")
        reply = Wait("reply", ("a",), 40.0, "the reply to a collective", 7, ("a", 1), ("b", 1))
        barrier = Wait("barrier", ("b",), 40.0, "worker 'b' to join a collective", 0, None, ("a", 1))
        a = worker("a", made=(collective,), served=(f, collective), waits=(reply, barrier))
        own = Wait("reply", ("a",), 40.0, "the reply to f", thread, ("b", 1))
        return analyze(GroupView((a, worker("b", made=(f,), waits=(own,)))))

    assert report_of(thread=5).cycles == ()
    assert len(report_of(thread=100).cycles) == 1  # the pid of b


def in_shutdown(*callers: str) -> GroupView:
    """The callers are in shutdown(), and wait for a, which runs its program."""
    calls = tuple(LiveCall(1, name, "a", "a collective", 43.0, state="deferred") for name in callers)
    waits = [Wait("shutdown", ("a",), 43.0, "worker 'a' to join shutdown()", 0, None, (name, 1)) for name in callers]
    stack = (Frame("train.py", 17, "<module>", "sleep()"),)
    a = worker("a", served=calls, waits=tuple(waits), stacks={100: stack})
    return GroupView((a, *(worker(name, made=(call,)) for name, call in zip(callers, calls, strict=True))))


def test_workers_that_serve_in_shutdown_are_named_once_and_are_not_stuck() -> None:
    lines = render(analyze(in_shutdown("b", "c"), 1.0)).splitlines()
    assert lines == [
        "Nothing is older than 1 s.",
        "In shutdown() for 7.0 s, and serving calls meanwhile: 'b', 'c'",
        "    waits for worker 'a' to join shutdown()",
        "    the main thread of worker 'a' is at train.py:17 in <module>",
    ]


def test_a_method_named_shutdown_that_does_not_end_is_stuck() -> None:
    call = LiveCall(1, "a", "b", "shutdown() of a remote object", 40.0, state="queued")
    wait = Wait("queue", (), 40.0, "its turn at an ordered object, which runs Actor.shutdown()", 0, None, ("a", 1))
    (root,) = analyze(GroupView((worker("a", made=(call,)), worker("b", served=(call,), waits=(wait,)))), 1.0).roots
    assert not root.expected


def test_a_wait_of_two_threads_is_shown_once() -> None:
    view = waiting_pair()
    doubled = msgspec.structs.replace(view.workers[0], waits=view.workers[0].waits * 2)
    both = msgspec.structs.replace(view, workers=(doubled, *view.workers[1:]))
    assert render(analyze(both)) == render(analyze(view))


def test_a_deadline_that_has_passed_is_said_to_have() -> None:
    call = LiveCall(1, "a", "b", "m:f", 41.0, deadline=50.0, state="sent")
    group = GroupView((worker("a", made=(call,)), worker("b", served=(call,))))
    assert "9.0 s old, its deadline has passed" in render(analyze(group))


def test_passes_and_waits_of_threads_are_shown_with_their_ages() -> None:
    gate = "the gradient of message 0x5 from worker 'c'"
    run = PassView(8, 6, 41.0, "b", ("c", "d"), 1, 2, (gate,), "waits in gates", (7, 9))
    waits = (
        Wait("member", ("e",), 44.7, "worker 'e' to join"),
        Wait("gate", ("c",), 42.0, gate),  # the pass says so
        Wait("connection", ("c",), 49.5, "a connection to worker 'c'"),  # too young
    )
    view = worker("a", passes=(run,), waits=waits, stacks={9: (Frame("train.py", 17, "step", "loss.backward()"),)})
    assert render(analyze(GroupView((view,)), 1.0)).splitlines() == [
        "2 calls, passes and waits are older than 1 s:",
        "- backward pass 0x8 of context 0x6 on 'a', begun by 'b': waits in gates, islands: 1 run, 2 left, 9.0 s old",
        "    train.py:17 in step: loss.backward()",
        f"    a gate waits for {gate}",
        "    waits for replies of 'c', 'd'",
        "- a thread of worker 'a' waits for worker 'e' to join, for 5.3 s",
    ]


def test_a_call_that_has_not_arrived_says_why() -> None:
    calls = (
        LiveCall(1, "a", "b", "f", 44.0, 52.5, state="sent", where="train.py:3 in step"),
        LiveCall(2, "a", "b", "", 45.0, state="unsent"),
        LiveCall(3, "a", "c", "h", 46.0, state="sent"),
    )
    silent = {"c": "it did not answer in time"}
    text = render(analyze(GroupView((worker("a", made=calls), worker("b")), silent), 1.0))
    assert text.splitlines()[1:] == [
        "- call 1: 'a' -> 'b': f, on its way, 6.0 s old, deadline in 2.5 s",
        "    called at train.py:3 in step",
        "- call 2: 'a' -> 'b': a function by value, not sent, 5.0 s old",
        "- call 3: 'a' -> 'c': h, its worker does not answer, 4.0 s old",
        "worker 'c' is silent: it did not answer in time",
    ]


def test_of_each_worker_that_has_not_come_is_said_what_it_does() -> None:
    waiting = Wait("barrier", ("b", "c", "d", "e"), 40.0, "workers to join", 0, None, ("z", 1))
    call = LiveCall(1, "z", "a", "a collective", 40.0, state="deferred")
    stack = (Frame("torch.py", 1, "wait", "", True), Frame("lib.py", 2, "poll", "", True))
    group = (
        worker("a", served=(call,), waits=(waiting,)),
        worker("b", waits=(Wait("value", (), 41.0, "the value of an RRef"), Wait("member", ("x",), 41.0, "x to join"))),
        worker("c", stacks={100: stack}),
        worker("d", stacks={101: stack}, threads=130),
        worker("e"),
    )
    (root,) = analyze(GroupView(group), 10.0).roots
    assert root.waits == (
        "waits for workers to join",
        "worker 'b' itself waits for the value of an RRef and for x to join",
        "the main thread of worker 'c' is at lib.py:2 in poll",
        "the main thread of worker 'd' is at an unknown line: it has 130 threads",
        "worker 'e' waits for nothing of telegrad's",
    )


def test_a_text_is_shortened_to_its_limit() -> None:
    text = render(analyze(waiting_pair(), 1.0), limit=300)
    assert len(text) <= 300
    assert text.endswith("(shortened; see `telegrad stuck`)")


@given(st.lists(st.tuples(nodes, nodes, st.booleans()), max_size=20))
def test_every_old_call_is_shown_exactly_once(links: list[tuple[CallKey, CallKey, bool]]) -> None:
    keys = {key for link in links for key in link[:2]}
    views = {
        name: worker(name, made=tuple(LiveCall(key[1], name, "a", "f", 1.0) for key in sorted(keys) if key[0] == name))
        for name in "abc"
    }
    waits = tuple(Wait("reply", (), 1.0, "it", 0, to, key) for key, to, _ in links)
    views["a"] = msgspec.structs.replace(views["a"], waits=waits)
    assert count(analyze(GroupView(tuple(views.values())), 1.0).roots) == len(keys)


def test_functions_that_call_each_other_without_end_are_shown() -> None:
    """Thousands of calls below each other must not exhaust the stack of whoever looks."""
    depth = 3000
    calls = tuple(LiveCall(number, "a", "a", "f", 1.0, state="running") for number in range(1, depth + 1))
    waits = tuple(Wait("reply", ("a",), 1.0, "it", 0, ("a", each + 1), ("a", each)) for each in range(1, depth))
    report = analyze(GroupView((worker("a", made=calls, waits=waits),)), 1.0)
    assert count(report.roots) == depth
    assert render(report).count("- call ") == depth
    assert msgspec.json.decode(msgspec.json.encode(report))["roots"]
