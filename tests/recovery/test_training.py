"""A training that loses workers ends with the same parameters, bit for bit, as one that loses none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import telegrad
from telegrad import recovery
from telegrad.default_agent import acting_as
from telegrad.errors import RecoveryFailed, TelegradError, WorkerLost
from telegrad.recovery import files
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Simulation

NAMES = ["driver", "b", "c", "d"]
STEPS = 12


class Part(torch.nn.Module):
    """A part of the model with dropout, a running mean and some state that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.25)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.norm(self.layer(x))).tanh()

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def build() -> SimpleNamespace:
    parts = [telegrad.nn.RemoteModule(name, Part, (number,)) for number, name in enumerate("bcd")]
    references = [reference for part in parts for reference in part.remote_parameters()]
    torch.manual_seed(9)  # when all parts exist: simulated workers share the generator of this process
    head = torch.nn.Linear(4, 1)
    local = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    optimizer = telegrad.optim.DistributedOptimizer(torch.optim.Adam, references, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return SimpleNamespace(parts=parts, head=head, local=local, optimizer=optimizer, scheduler=scheduler)


def step(state: Any, number: int, losses: dict[int, float]) -> None:
    with telegrad.autograd.context() as context_id:
        x = torch.randn(8, 4)
        for part in state.parts:
            x = part(x)
        loss = state.head(x).square().mean()
        telegrad.autograd.backward(context_id, [loss])
        for parameter, grad in telegrad.autograd.get_gradients(context_id).items():
            parameter.grad = grad
        state.local.step()
        state.optimizer.step(context_id)
        state.scheduler.step()
    losses[number] = loss.item()


def result(state: Any) -> dict[str, torch.Tensor]:
    found = {f"head.{name}": value for name, value in state.head.state_dict().items()}
    for number, part in enumerate(state.parts):
        found.update({f"{number}.{name}": torch.as_tensor(value) for name, value in part.state_dict().items()})
    return found


def train(
    sim: Simulation, disturb: Callable[[int], None] = lambda number: None, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[int, float], recovery.Training[Any]]:
    losses: dict[int, float] = {}
    with acting_as(sim["driver"]):
        torch.manual_seed(1)
        training = recovery.Training(build, every=4, **options)
        for number in training.steps(STEPS):
            with training:
                disturb(number)
                step(training.state, number, losses)
        return result(training.state), losses, training


def simulate(program: Callable[[Simulation], Any], seed: int = 1) -> Any:
    with Simulation(seed, NAMES) as sim:
        return sim.run(lambda: program(sim))


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """Leave the generators of the process as they were."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    with torch.random.fork_rng(devices=[]):
        parameters, losses, training = simulate(train)
    assert training.recoveries == []
    return parameters, losses


def replace_at(sim: Simulation, kills: dict[int, str]) -> Callable[[int], None]:
    """Return a function that kills workers before these steps. Each is started again after 3 seconds."""

    def disturb(number: int) -> None:
        for name in kills.pop(number, ""):
            sim.kill(name)

            def restart(name: str = name) -> None:
                sim.sleep(3.0)
                sim.restart(name)

            sim.scheduler.start("launcher", f"restart {name}", restart)

    return disturb


@pytest.mark.parametrize(
    "kills",
    [
        {5: "b"},
        {0: "c"},
        {4: "d", 7: "b"},
        {1: "b", 6: "b", 9: "b"},
        {5: "bc"},
        {11: "c"},
    ],
    ids=str,
)
def test_the_result_is_the_same_whoever_is_killed_when(kills: dict[int, str], undisturbed: Any) -> None:
    def program(sim: Simulation) -> Any:
        return train(sim, replace_at(sim, dict(kills)))

    parameters, losses, training = simulate(program)
    assert losses == undisturbed[1]
    for name, value in undisturbed[0].items():
        assert torch.equal(parameters[name], value), name
    assert [each.step for each in training.recoveries] == list(kills)
    for each in training.recoveries:  # from the last snapshot, or the one before if that was not complete
        assert each.resumed in (each.step // 4 * 4, max(0, each.step // 4 * 4 - 4))
    assert [each.workers for each in training.recoveries] == [tuple(names) for names in kills.values()]


def test_a_worker_that_is_lost_while_another_one_is_waited_for_is_recorded() -> None:
    def program(sim: Simulation) -> list[recovery.Recovery]:
        def disturb(number: int) -> None:
            if number == 5 and not killed:
                killed.append(number)
                replace_at(sim, {5: "b"})(5)
                sim.scheduler.start("launcher", "restart c", later)

        def later() -> None:
            sim.sleep(2.0)  # worker b is being waited for
            sim.kill("c")
            sim.restart("c")

        killed: list[int] = []
        return train(sim, disturb)[2].recoveries

    assert [each.workers for each in simulate(program)] == [("b", "c")]


def test_two_neighbours_cannot_both_be_lost_at_once_without_a_directory(tmp_path: Path, undisturbed: Any) -> None:
    def without(sim: Simulation) -> None:
        with pytest.raises(RecoveryFailed, match="worker 'b' was lost together with 'c', which held its snapshot"):
            train(sim, replace_at(sim, {5: "bc"}), copies=1)

    def with_directory(sim: Simulation) -> Any:
        return train(sim, replace_at(sim, {5: "bc"}), copies=0, directory=tmp_path / "snapshots")

    simulate(without)
    parameters, losses, _ = simulate(with_directory)
    assert losses == undisturbed[1]
    for name, value in undisturbed[0].items():
        assert torch.equal(parameters[name], value), name


def test_a_training_that_is_started_anew_goes_on_from_the_directory(tmp_path: Path, undisturbed: Any) -> None:
    def stop(number: int) -> None:
        if number == 9:
            raise KeyboardInterrupt

    def first(sim: Simulation) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(sim, stop, directory=tmp_path)

    simulate(first)
    torch.manual_seed(12345)
    parameters, losses, _ = simulate(lambda sim: train(sim, directory=tmp_path))
    assert losses == {number: loss for number, loss in undisturbed[1].items() if number >= 8}
    for name, value in undisturbed[0].items():
        assert torch.equal(parameters[name], value), name


def test_a_worker_that_is_not_replaced_ends_the_training() -> None:
    def program(sim: Simulation) -> None:
        def disturb(number: int) -> None:
            if number == 5:
                sim.kill("c")

        with pytest.raises(
            RecoveryFailed, match=r"worker 'c' was lost \(.*refuses .*\) and not replaced within 20 s: "
        ):
            train(sim, disturb, replacement_timeout=20.0)

    simulate(program)


def test_a_driver_that_the_others_have_lost_ends_to_be_started_again() -> None:
    def program(sim: Simulation) -> None:
        def disturb(number: int) -> None:
            if number == 5:
                for name in "bcd":
                    peers = sim[name].peers
                    peers.lost_workers.peer_lost(peers.find("driver"), "it was stopped for too long")

        began = sim.scheduler.now
        with pytest.raises(
            WorkerLost, match=r"worker 'driver' ends, so that its launcher starts it again: worker '[bcd]'"
        ):
            train(sim, disturb)
        assert sim.scheduler.now - began < 60

    with Simulation(1, NAMES, settings=AgentSettings(awaited_replacement=60.0)) as sim:
        sim.run(lambda: program(sim))


def test_an_error_that_is_no_loss_ends_the_training() -> None:
    def disturb(number: int) -> None:
        if number == 5:
            raise ZeroDivisionError("a bug")

    def program(sim: Simulation) -> None:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            train(sim, disturb)

    simulate(program)


@pytest.mark.parametrize("where", ["step", "build"])
def test_an_error_of_the_program_is_raised_although_a_worker_is_lost_then(where: str) -> None:
    def program(sim: Simulation) -> None:
        def fail() -> None:
            replace_at(sim, {0: "c"})(0)
            sim.sleep(5.0)  # the driver knows the replacement
            raise ZeroDivisionError("a bug")

        with acting_as(sim["driver"]):
            training = recovery.Training(fail if where == "build" else lambda: None)
            with pytest.raises(ZeroDivisionError, match="a bug") as caught:
                training.run(lambda state, number: fail(), 1)
        assert caught.value.__notes__ == [
            "(the step lost worker 'c', too, and is not repeated: no call raised this error)"
        ]

    simulate(program)


def fail_elsewhere() -> None:
    raise ValueError("what the worker before this one knew is missing")


def test_an_error_of_a_call_when_a_worker_is_lost_is_logged_and_the_step_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(sim: Simulation) -> list[recovery.Recovery]:
        def step(state: None, number: int) -> None:
            if not training.recoveries:
                replace_at(sim, {0: "c"})(0)
                sim.sleep(5.0)
                try:
                    telegrad.rpc_sync("c", fail_elsewhere)
                except ValueError as error:
                    raise ExceptionGroup("several", [error]) from None

        with acting_as(sim["driver"]):
            training = recovery.Training(lambda: None)
            training.run(step, 1)
        return training.recoveries

    assert [each.workers for each in simulate(program)] == [("c",)]
    assert "step 0 failed when a worker was lost, and is repeated: ExceptionGroup('several', [Value" in caplog.text


def test_an_error_that_was_raised_for_a_loss_is_a_loss(undisturbed: Any) -> None:
    def program(sim: Simulation) -> Any:
        replace = replace_at(sim, {5: "c"})
        killed: list[int] = []

        def disturb(number: int) -> None:
            replace(number)
            if number == 5 and not killed:
                killed.append(number)
                try:
                    raise WorkerLost("worker 'c' is lost, as another worker says before this one has noticed")
                except WorkerLost as error:
                    raise ValueError("the step failed") from error

        return train(sim, disturb)

    _, losses, training = simulate(program)
    assert losses == undisturbed[1]
    assert [(each.workers, each.step) for each in training.recoveries] == [(("c",), 5)]


def test_nothing_is_kept_when_the_training_is_over() -> None:
    def program(sim: Simulation) -> None:
        train(sim)
        sim.sleep(5)
        for agent in sim.agents.values():
            with acting_as(agent):
                vault = recovery.shares._vault()
                assert (vault.own, vault.held) == ({}, {})

    simulate(program)


def test_the_body_of_the_loop_must_be_in_a_with_statement() -> None:
    def program(sim: Simulation) -> None:
        with acting_as(sim["driver"]):
            training = recovery.Training(build)
            with pytest.raises(TelegradError, match="write `with training:` around the body"):
                list(training.steps(3))
            with pytest.raises(ValueError, match="at least 1"):
                recovery.Training(build, every=0)
            with pytest.raises(TelegradError, match="there is no state yet"):
                recovery.Training(build).state  # noqa: B018 - it raises

    simulate(program)


def test_a_worker_that_is_lost_before_the_first_step_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def program(sim: Simulation) -> Any:
        for name in "bc":
            assert sim["driver"].call(name, abs, (-1,)) == 1  # so that the driver notices its loss
        replace_at(sim, {0: "bc"})(0)
        sim.sleep(2.0)
        return train(sim)

    _, losses, training = simulate(program)
    assert len(losses) == STEPS
    assert [(each.workers, each.step, each.resumed) for each in training.recoveries] == [(("b", "c"), 0, 0)]
    assert "the training lost workers 'b' and 'c' in step 0, and waits for a replacement" in caplog.text
    assert "s after the loss of workers 'b' and 'c'" in caplog.text


def loops(sim: Simulation, counts: list[int], between: Callable[[], None] = lambda: None, **options: Any) -> Any:
    """Train in several loops. Worker b is killed in step 9."""
    losses: dict[int, float] = {}
    disturb = replace_at(sim, {9: "b"})
    with acting_as(sim["driver"]):
        torch.manual_seed(1)
        training = recovery.Training(build, every=4, **options)
        for count in counts:
            for number in training.steps(count):
                with training:
                    disturb(number)
                    step(training.state, number, losses)
            between()
        return losses, training.recoveries


def test_a_loop_after_another_one_survives_a_loss(undisturbed: Any) -> None:
    losses, recoveries = simulate(lambda sim: loops(sim, [7, STEPS]))
    assert losses == undisturbed[1]
    assert [(each.step, each.resumed) for each in recoveries] == [(9, 8)] or recoveries[0].resumed == 7


def test_a_loss_between_two_loops_needs_a_directory(tmp_path: Path, undisturbed: Any) -> None:
    def program(sim: Simulation, **options: Any) -> Any:
        kills = {0: "c"}

        def between() -> None:
            replace_at(sim, kills)(0)
            kills.clear()
            sim.sleep(5.0)

        return loops(sim, [7, STEPS], between, **options)

    def without(sim: Simulation) -> None:
        with pytest.raises(RecoveryFailed, match="lost worker 'c' between two loops over steps"):
            program(sim)

    simulate(without)
    losses, recoveries = simulate(lambda sim: program(sim, directory=tmp_path))
    assert losses == undisturbed[1]
    assert (recoveries[0].workers, recoveries[0].resumed) == (("c",), 4)


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "of another run"])
def test_a_directory_that_has_lost_the_snapshot_is_not_begun_anew(tmp_path: Path, removed: bool) -> None:
    def program(sim: Simulation) -> None:
        def between() -> None:
            if removed:
                (tmp_path / files.LATEST).unlink()
            else:
                (tmp_path / files.LATEST).write_text('{"number": 1, "step": 0, "run": "aa"}')
            sim.kill("c")
            sim.restart("c")
            sim.sleep(5.0)

        text = r"snapshot \d+ of this training is not the last one in .* any more: pass each training a directory"
        with pytest.raises(RecoveryFailed, match=text):
            loops(sim, [7, STEPS], between, directory=tmp_path)

    simulate(program)


def test_two_trainings_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    def program(sim: Simulation) -> None:
        with acting_as(sim["driver"]):
            first, second = (recovery.Training(dict, every=1, directory=tmp_path) for _ in range(2))
            loop = first.steps(3)
            next(loop)
            second.run(lambda state, number: None, 2)
            with first, pytest.raises(RecoveryFailed, match=r"has written snapshot . to .* since this one began"):
                first._take_snapshot()
            loop.close()
            latest = files.latest(tmp_path)
            assert latest is not None
            assert latest.step == 2

    simulate(program)


def test_a_worker_that_leaves_in_order_is_not_waited_for(undisturbed: Any) -> None:
    def program(sim: Simulation) -> Any:
        disturb = replace_at(sim, {9: "b"})

        def leave(number: int) -> None:
            if number == 3:
                sim["e"].shutdown(graceful=False)
                sim.sleep(1.0)
            disturb(number)

        return train(sim, leave)

    with Simulation(1, [*NAMES, "e"]) as sim:
        _, losses, training = sim.run(lambda: program(sim))
    assert losses == undisturbed[1]
    assert [each.workers for each in training.recoveries] == [("b",)]


def test_a_driver_that_was_started_again_says_that_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def program(sim: Simulation) -> None:
        sim.kill("driver")
        sim.sleep(2.0)
        sim.restart("driver")
        with acting_as(sim["driver"]):
            for directory in (tmp_path, None):
                recovery.Training(lambda: None, directory=directory).run(lambda state, number: None, 2)

    text = "worker 'driver' was started again, and its training begins anew: pass a directory to Training"
    simulate(program)
    assert caplog.text.count(text) == 1


def test_the_directory_of_another_training_is_refused(tmp_path: Path) -> None:
    simulate(lambda sim: train(sim, directory=tmp_path))

    def program(sim: Simulation, other: Callable[[], Any], message: str) -> None:
        with acting_as(sim["driver"]):
            training = recovery.Training(other, directory=tmp_path)
            with pytest.raises(RecoveryFailed, match=message):
                training.run(lambda state, number: None, 3)
            with pytest.raises(TelegradError, match="there is no state yet"):
                training.state  # noqa: B018 - what was built but not loaded is not used

    def wider() -> SimpleNamespace:
        state = build()
        state.head = torch.nn.Linear(5, 1)
        return state

    simulate(lambda sim: program(sim, lambda: torch.nn.Linear(1, 1), "has built other objects on worker"))
    simulate(lambda sim: program(sim, wider, r"state of state.head on worker 'driver' cannot be loaded: weight: a ten"))


@pytest.mark.parametrize("options", [{"every": 2.5}, {"copies": 1.5}, {"replacement_timeout": float("nan")}], ids=str)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|at least 0"):
        recovery.Training(lambda: None, **options)


def test_a_reference_to_what_cannot_be_saved_is_named() -> None:
    def program(sim: Simulation) -> None:
        with acting_as(sim["driver"]):
            training = recovery.Training(lambda: {"total": telegrad.remote("b", int)}, every=4)
            with pytest.raises(TypeError, match=r"^state\['total'\] on worker 'b': no snapshot can be taken of a int"):
                next(training.steps(1))

    simulate(program)


def test_a_with_statement_outside_of_the_loop_is_refused() -> None:
    def program(sim: Simulation) -> None:
        with acting_as(sim["driver"]):
            training = recovery.Training(lambda: None)
            with pytest.raises(TelegradError, match="belongs into the body of a loop"), training:
                pass
            loop = training.steps(3)
            next(loop)
            with pytest.raises(TelegradError, match="one at a time"):
                next(training.steps(3))
            loop.close()

    simulate(program)


def test_a_holder_that_is_replaced_while_the_state_is_built_again_is_a_loss() -> None:
    built: list[int] = []

    def program(sim: Simulation) -> list[recovery.Recovery]:
        def build_slowly() -> torch.Tensor:
            built.append(len(built))
            if built[-1] == 1:
                sim.kill("b")
                sim.restart("b")
                sim.sleep(5.0)
            return torch.zeros(1)

        def step(state: torch.Tensor, number: int) -> None:
            if number == 1 and len(built) == 1:
                sim.kill("c")
                sim.restart("c")
                telegrad.rpc_sync("c", torch.zeros, (1,))
                raise ConnectionError("c was replaced")
            state += number

        with acting_as(sim["driver"]):
            training = recovery.Training(build_slowly)
            training.run(step, 3)
            assert training.state.item() == 3
            return training.recoveries

    assert [each.workers for each in simulate(program)] == [("b", "c")]
    assert built == [0, 1, 2]


@pytest.mark.parametrize("seconds", [2.0, 15.0])
def test_two_replacements_that_find_each_other_late_are_waited_for(seconds: float, undisturbed: Any) -> None:
    def program(sim: Simulation) -> Any:
        def disturb(number: int) -> None:
            if number == 5 and not sim.network.parted and not waited:
                sim.network.part("b", "c")
                replace_at(sim, {5: "bc"})(5)

                def heal() -> None:
                    sim.sleep(3.0 + seconds)
                    waited.append(seconds)
                    sim.network.heal()

                sim.scheduler.start("launcher", "heal", heal)

        waited: list[float] = []
        return train(sim, disturb)

    parameters, losses, training = simulate(program)
    assert losses == undisturbed[1]
    assert all(torch.equal(parameters[name], value) for name, value in undisturbed[0].items())
    assert [each.workers for each in training.recoveries] == [("b", "c")]
    assert training.recoveries[0].seconds > seconds


def test_workers_that_never_find_each_other_are_named() -> None:
    def program(sim: Simulation) -> None:
        def lose(number: int) -> None:
            if number == 5:
                sim.kill("d")
                sim.restart("d")
                b = sim["b"].peers
                b.lost_workers.peer_lost(b.find("c"), "for a test")

        text = "worker 'b' has lost worker 'c', which worker 'driver' has not, .* within 30 s: see that all workers can"
        with pytest.raises(RecoveryFailed, match=text):
            train(sim, lose, replacement_timeout=30.0)

    simulate(program)


@pytest.mark.parametrize("restart", [True, False], ids=["with a copy", "all copies lost"])
def test_what_is_built_again_before_the_first_snapshot_is_built_with_the_same_random_numbers(restart: bool) -> None:
    def program(sim: Simulation, kills: str) -> Any:
        remaining = list(kills)

        def build_without_seed() -> torch.nn.Linear:
            layer = torch.nn.Linear(4, 4)
            if remaining:
                names, remaining[:] = list(remaining), []
                for name in names:
                    sim.kill(name)
                for name in names:
                    sim.restart(name)
                telegrad.rpc_sync(names[0], max, (1, 2))
            return layer

        with acting_as(sim["driver"]):
            torch.manual_seed(5)
            training = recovery.Training(build_without_seed, every=4, copies=1)
            for _ in training.steps(1):
                with training:
                    pass
            return training.state.weight.detach().clone(), [(each.step, each.resumed) for each in training.recoveries]

    expected, _ = simulate(lambda sim: program(sim, ""))
    weight, recoveries = simulate(lambda sim: program(sim, "b" if restart else "bc"))
    assert recoveries == [(0, 0)]
    assert torch.equal(weight, expected)


def test_a_loop_that_is_left_after_a_step_goes_on_with_the_next() -> None:
    def spoil(state: None, number: int) -> None:
        raise ValueError("spoiled")

    def program(sim: Simulation) -> list[int]:
        seen: list[int] = []
        with acting_as(sim["driver"]):
            training = recovery.Training(lambda: None, every=4)
            for number in training.steps(9):
                with training:
                    seen.append(number)
                    if number == 2:
                        break
            for number in training.steps(6):
                with training:
                    seen.append(number)
                if number == 4:
                    break
            with pytest.raises(ValueError, match="spoiled"):
                training.run(spoil, 6)
            for number in training.steps(6):
                with training:
                    seen.append(number)
        return seen

    assert simulate(program) == [0, 1, 2, 3, 4, 5]


def test_an_empty_string_is_no_directory_for_snapshots() -> None:
    with pytest.raises(ValueError, match="the directory for snapshots is an empty string"):
        recovery.Training(dict, every=1, directory="")
