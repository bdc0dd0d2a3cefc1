"""Plans are drawn from seeds, and contain every action and every fault."""

from __future__ import annotations

from telegrad.testing.universe.plan import ENDS_HANDSHAKES, FOREVER, Fault, draw_plan

PLANS = [draw_plan(seed) for seed in range(600)]


def test_a_seed_always_gives_the_same_plan() -> None:
    assert draw_plan(11) == draw_plan(11)
    assert draw_plan(11) != draw_plan(12)


def test_every_fault_and_action_is_drawn() -> None:
    faults = {fault.kind for plan in PLANS for fault in plan.faults}
    assert faults == {
        *("noise", "harsh noise", "cut", "half open", "stall", "one-way", "partition", "slow", "freeze", "jump"),
        *("kill", "restart", "rejoin", "contest", "usurpation", "leave", "join", "visit"),
    }
    actions = {action.kind for plan in PLANS for _, program in plan.programs for action in program}
    assert actions == {
        *("call", "calls", "coroutine", "fail", "create", "own", "fetch", "share", "pass on", "drop", "actor"),
        *("train", "persist", "retry", "sleep"),
    }
    assert any(plan.autograd_program is not None for plan in PLANS)
    assert any(plan.gathers for plan in PLANS)
    assert {len(plan.workers) for plan in PLANS} >= {2, 3, 12}


def test_some_groups_are_open_and_only_those_have_newcomers() -> None:
    is_open = [plan for plan in PLANS if plan.is_open]
    assert 0.1 < len(is_open) / len(PLANS) < 0.2
    assert all("open" in str(plan) for plan in is_open)
    assert {len([fault for fault in plan.faults if fault.kind in ("join", "visit")]) for plan in is_open} == {1, 2, 3}


def test_partitions_heal_or_not() -> None:
    lengths = [fault.seconds for plan in PLANS for fault in plan.faults if fault.kind == "partition"]
    assert any(length == FOREVER for length in lengths)
    assert any(length < 1.0 for length in lengths)


def test_a_short_delay_loses_no_worker() -> None:
    assert not Fault(0.0, "freeze", ("w0",), 5.0).may_lose(resumable=True)
    assert Fault(0.0, "freeze", ("w0",), 35.0).may_lose(resumable=True)
    assert Fault(0.0, "stall", ("w0", "w1"), ENDS_HANDSHAKES + 1).may_lose(resumable=False)
    assert Fault(0.0, "kill", ("w0",)).may_lose(resumable=True)


def test_a_plan_can_be_read() -> None:
    text = "\n".join(map(str, PLANS[:50]))
    assert "workers over tcp" in text
    assert "for ever" in "\n".join(map(str, PLANS))
