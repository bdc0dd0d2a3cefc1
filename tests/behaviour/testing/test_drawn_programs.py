"""Random programs are drawn from a seed, run by the oracle, and shrunk when they fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from telegrad.testing.programs import (
    FEATURES,
    Body,
    Leaves,
    Pass,
    PostHook,
    Program,
    chosen,
    differences,
    draw_program,
    refusal,
    run_locally,
    shrink,
)


def program(*steps: tuple[object, ...], passes: list[Pass], **others: object) -> Program:
    """Make a program of two workers whose main body has these steps."""
    leaves = Leaves(1, [["double"] * 2] * 2)
    made = Program(0, frozenset(), 2, leaves, [Body(list(steps), [0])], passes)
    return replace(made, **others)  # type: ignore[arg-type]


def test_a_seed_draws_the_same_program_each_time() -> None:
    for seed in range(50):
        assert str(draw_program(seed)) == str(draw_program(seed))


def test_programs_of_many_seeds_have_every_feature() -> None:
    assert frozenset().union(*(draw_program(seed).features for seed in range(100))) == set(FEATURES)


def test_a_feature_can_be_chosen_alone_or_left_out() -> None:
    assert draw_program(3, features=chosen(["views"])).features == {"views"}
    assert "views" not in frozenset().union(
        *(draw_program(seed, features=chosen(None, ["views"])).features for seed in range(100))
    )
    with pytest.raises(ValueError, match="no feature 'view'"):
        chosen(["view"])


@pytest.mark.parametrize("feature", FEATURES)
def test_the_oracle_runs_programs_with_each_feature(feature: str) -> None:
    worked = 0
    for seed in range(30):
        drawn = draw_program(seed, features=chosen([feature]))
        outcome = run_locally(drawn)
        assert differences(outcome, run_locally(drawn), drawn) == []
        worked += outcome.error is None and any(grad is not None for row in outcome.grads for grad in row)
        worked += any(found for found in outcome.results)
    assert worked > 10


def test_another_dtype_is_a_difference() -> None:
    simple = program(passes=[Pass("backward", (0,))])
    got, want = run_locally(simple), run_locally(simple)
    assert got.grads[0][0] is not None
    got.grads[0][0] = got.grads[0][0].float()
    assert len(differences(got, want, simple)) == 1


def test_an_error_on_one_side_is_a_difference_unless_it_is_documented() -> None:
    simple = program(passes=[Pass("backward", (0,))])
    got, want = run_locally(simple), run_locally(simple)
    got.results, got.error = [], RuntimeError("no such thing")
    assert refusal(got, want) == ""
    assert "no such thing" in differences(got, want, simple)[0]
    got.error = RuntimeError("Output 0 of RecvRpcBackward is a view and is being modified inplace.")
    assert refusal(got, want)


def test_hooks_on_the_way_to_siblings_of_inputs_may_run() -> None:
    # Both leaves travel in one message. The hook is on the way to the second, and the pass needs the first.
    body = Body([], [2, 3])
    steps = [("call", 1, (0, 1), 1, ()), ("op", "mul", 3, 3, False), ("hook", 4, 7), ("op", "add", 2, 4, False)]
    passes = [Pass("grad", (5,), (0,)), Pass("grad", (5,), (1,))]
    drawn = program(*steps, passes=passes)
    drawn.bodies.append(body)
    outcome = run_locally(drawn)
    assert outcome.may_run == {(0, 7)}
    assert outcome.comparable == 1  # the second pass may find buffers freed
    assert (0, 7) not in outcome.hooks
    assert (1, 7) in outcome.hooks


def test_multi_grad_hooks_on_leaves_are_not_compared_where_a_nested_backward_may_confuse_torch() -> None:
    hook = ("multi-grad hook", "all", (0, 1), 7)
    plain, nested = (
        run_locally(program(*steps, passes=[Pass("backward", (2,))]))
        for steps in ([("op", "mul", 0, 1, False), hook], [("run again", "by hand", 0, 1), hook])
    )
    assert plain.may_run == set()
    assert nested.may_run == {(0, 7), (0, 8)}


def test_post_accumulate_hooks_call_along_their_routes() -> None:
    leaves = Leaves(1, [["double"] * 2] * 2, [PostHook(0, 0, (1, 0, 1), 7)])
    outcome = run_locally(program(passes=[Pass("backward", (0,))], leaves=leaves))
    assert torch.equal(outcome.hooks[0, 7][0], torch.full((3,), 8.0, dtype=torch.double))  # doubled at each stop


def test_a_program_is_shrunk_to_what_fails() -> None:
    drawn = next(
        drawn for drawn in map(draw_program, range(100)) if drawn.has("wrap") and len(drawn.bodies) > 3 and drawn.passes
    )
    small = shrink(drawn, lambda smaller: smaller.has("wrap"))
    steps = [step[0] for number in small.reached() for step in small.bodies[number].steps]
    assert [kind for kind in steps if kind not in ("again", "call")] == ["wrap"]
    assert len(small.passes) == 1
