"""Programs with a worker that is later than the default timeout of calls, and connections that take long."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import telegrad
from telegrad.errors import WorkerLost
from telegrad.testing.simulation import Simulation

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_parameter_server_waits_for_a_trainer_that_is_64_seconds_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example: Any = importlib.import_module("parameter_server")
    names, late = ["ps", *example.TRAINERS], example.TRAINERS[-1]
    losses: dict[str, dict[str, list[float]]] = {}
    with Simulation(seed=1, workers=names) as sim:

        def work(name: str) -> None:
            mine = telegrad.RRef(example.ParameterServer(), ordered=True) if name == "ps" else None
            server = telegrad.all_gather(mine)["ps"]
            if name == late:
                sim.sleep(64.0)
            losses[name] = telegrad.all_gather(example.train(server, name, 3) if name != "ps" else None)

        def program() -> None:
            threads = {name: sim.spawn(name, partial(work, name)) for name in names}
            for name, thread in threads.items():
                assert thread.join(100.0), f"{name} still waits"

        sim.run(program)
    for trainer, expected in zip(example.TRAINERS, example.train_alone(3), strict=True):
        assert losses["ps"][trainer] == pytest.approx(expected)


def test_a_worker_that_cannot_be_reached_is_named_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:

        def program() -> None:
            sim.network.part("a", "b")
            with pytest.raises(WorkerLost):
                sim["a"].call("b", abs, (-1,))

        sim.run(program)
    lines = [record.getMessage() for record in caplog.records if "tried" in record.getMessage()]
    assert lines == [f"worker 'a' has tried to reach worker 'b' at memory://b for {n} s" for n in (3, 6, 12, 24)]
