"""Training that is saved, and restored in another group, continues as if it had not been interrupted.

These tests train the examples, which show that each step has the same loss as in one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.paths import ROOT

import telegrad
from telegrad import launch

EXAMPLES = ROOT / "examples"
STEPS = 12
Half = Callable[[int, Any], Any]


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def both_halves(half: Half, workers: list[str], path: Path) -> list[Any]:
    """Run each half of a training in its own group, pass the state through a file, and return the losses of both."""
    losses_of_halves = []
    state = None
    for number in range(2):
        results = launch.local(half, workers, (number, state), timeout=100)
        losses, saved = next(result for result in results if result is not None)
        torch.save(saved, path)
        state = torch.load(path, weights_only=False)
        losses_of_halves.append(losses)
    return losses_of_halves


def close(losses: list[float], expected: list[float]) -> bool:
    return torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-9)


# -- a parameter server ---------------------------------------------------------------------------------------


def half_with_a_server(number: int, state: Any) -> Any:
    example = importlib.import_module("parameter_server")
    me = telegrad.get_worker_info().name
    server = None
    if me == "ps":
        server = example.ParameterServer()
        if state is not None:
            server.model.load_state_dict(state["model"])
            server.optimizer.load_state_dict(state["optimizer"])
    shared = telegrad.all_gather(telegrad.RRef(server, ordered=True) if server is not None else None)["ps"]
    losses = telegrad.all_gather(example.train(shared, me, STEPS // 2) if server is None else None)
    if server is None:
        return None
    saved = {"model": server.model.state_dict(), "optimizer": server.optimizer.state_dict()}
    return [losses[name] for name in example.TRAINERS], saved


def test_a_parameter_server_continues_after_a_restart(tmp_path: Path) -> None:
    example = importlib.import_module("parameter_server")
    first, second = both_halves(half_with_a_server, ["ps", *example.TRAINERS], tmp_path / "state")
    for before, after, expected in zip(first, second, example.train_alone(STEPS), strict=True):
        assert close(before + after, expected)


# -- a pipeline -----------------------------------------------------------------------------------------------


def half_of_a_pipeline(number: int, state: Any) -> Any:
    example = importlib.import_module("pipeline")
    if telegrad.get_worker_info().name != "trainer":
        return None
    stages = [telegrad.remote(f"stage{place}", example.Stage, (place,)) for place in range(example.STAGES)]
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = telegrad.optim.DistributedOptimizer(torch.optim.AdamW, parameters, lr=0.01)
    if state is not None:
        for stage, theirs in zip(stages, state["stages"], strict=True):
            stage.rpc_sync().load_state_dict(theirs)
        optimizer.load_state_dict(state["optimizer"])
    losses = example.train(stages, optimizer, STEPS // 2)
    return losses, {
        "stages": [stage.rpc_sync().state_dict() for stage in stages],
        "optimizer": optimizer.state_dict(),
    }


def test_a_pipeline_continues_after_a_restart(tmp_path: Path) -> None:
    example = importlib.import_module("pipeline")
    first, second = both_halves(half_of_a_pipeline, ["trainer", "stage0", "stage1", "stage2"], tmp_path / "state")
    assert close(first + second, example.train_alone(STEPS))


# -- actors and a learner -------------------------------------------------------------------------------------


def half_of_a_game(number: int, state: Any) -> Any:
    example = importlib.import_module("actor_learner")
    me = telegrad.get_worker_info().name
    learner = example.Learner() if me == "learner" else None
    player = example.Player(example.ACTORS.index(me)) if me in example.ACTORS else None
    if state is not None and learner is not None:
        learner.policy.load_state_dict(state["policy"])
        learner.optimizer.load_state_dict(state["optimizer"])
    if state is not None and player is not None:
        player.generator.set_state(state["chance"][me])
    shared = telegrad.all_gather(telegrad.RRef(learner, ordered=True) if learner is not None else None)["learner"]
    for _ in range(example.ROUNDS // 2):
        if player is not None:
            shared.rpc_sync().add_episode(example.ACTORS.index(me), player.play(shared.rpc_sync().weights()))
        telegrad.barrier()
    chance = telegrad.all_gather(player.generator.get_state() if player is not None else None)
    if learner is None:
        return None
    return learner.losses, {
        "policy": learner.policy.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "chance": chance,
    }


def test_actors_and_their_learner_continue_after_a_restart(tmp_path: Path) -> None:
    example = importlib.import_module("actor_learner")
    first, second = both_halves(half_of_a_game, ["learner", *example.ACTORS], tmp_path / "state")
    assert close(first + second, example.train_alone())


# -- a split model -------------------------------------------------------------------------------------------


def half_of_a_split_model(number: int, state: Any) -> Any:
    example = importlib.import_module("encoder_decoder")
    if telegrad.get_worker_info().name != "trainer":
        return None
    model = example.place(example.Reverser())
    optimizer = telegrad.optim.DistributedOptimizer(torch.optim.Adam, telegrad.nn.parameter_rrefs(model), lr=0.02)
    scheduler = example.schedule(optimizer)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    steps = range(number * STEPS // 2, (number + 1) * STEPS // 2)
    losses = example.train(model, optimizer, scheduler, steps)
    return losses, {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def test_a_split_model_continues_after_a_restart(tmp_path: Path) -> None:
    example = importlib.import_module("encoder_decoder")
    first, second = both_halves(half_of_a_split_model, ["trainer", "left", "right"], tmp_path / "state")
    assert close(first + second, example.train_alone(range(STEPS)))
