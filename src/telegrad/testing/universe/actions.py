"""What the programs of a universe do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad import rpc
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.rref.handle import RRef
from telegrad.testing.universe.judge import objection
from telegrad.testing.universe.persistence import Persistence
from telegrad.testing.universe.plan import Action
from telegrad.testing.universe.retries import Retries
from telegrad.testing.universe.training import Training
from telegrad.testing.universe.world import Handle, World

_GATHER_LIMIT = 200.0


class Program:
    """One thread of a worker, which carries out actions."""

    def __init__(self, world: World, worker: str, number: int) -> None:
        self._world = world
        self._worker = worker
        self._number = number
        self._noted = 0
        self._using: str | None = None  # the value of the reference that the current action uses

    @property
    def _mine(self) -> list[tuple[str, Handle]]:
        return self._world.mine[self._worker]

    def run(self, actions: tuple[Action, ...]) -> None:
        """Carry out all actions. One that fails does not end the program."""
        for action in actions:
            self._attempt(str(action), partial(self._carry_out, action), action)

    def gather(self, members: tuple[str, ...]) -> None:
        """Take part in a collective."""

        def gather() -> None:
            values = default_agent().gather(self._worker, members, timeout=_GATHER_LIMIT)
            if values != {member: member for member in members}:
                self._world.violated(f"a gather of {members} on {self._worker} returned {values}")

        self._attempt(f"gather of {' '.join(members)}", gather, Action("gather"))

    def shut_down(self, timeout: float) -> None:
        """Leave the group with everybody else."""
        agent = default_agent()
        self._attempt("shutdown", lambda: agent.shutdown(timeout=timeout), Action("shutdown"))

    def _attempt(self, what: str, carry_out: Callable[[], None], action: Action) -> None:
        world = self._world
        world.story.add(self._worker, "begins %s", what)
        self._using = None
        try:
            carry_out()
        except (TelegradError, LookupError) as error:
            reason = objection(
                world,
                error,
                here=self._worker,
                may_be_late=bool(action.timeout) or (world.disturbed and action.kind in ("gather", "retry")),
                may_be_cancelled=action.kind == "calls" and action.flag,
                lineage=world.lineage[self._using] if self._using is not None else (),
            )
            world.counts[type(error).__name__] += 1
            world.story.add(self._worker, "fails %s: %s: %s", what, type(error).__name__, str(error))
            if reason:
                world.violated(f"{what} on {self._worker} raised {type(error).__name__}: {error}\n  but {reason}")
        else:
            world.counts[action.kind] += 1
            world.story.add(self._worker, "ends %s", what)

    def _carry_out(self, action: Action) -> None:
        match action.kind:
            case "call":
                self._call("@hop", list(action.workers), bytes(action.size), timeout=action.timeout)
            case "coroutine":
                self._call("@later", list(action.workers), timeout=action.timeout)
            case "calls":
                self._calls(action)
            case "fail":
                self._fail(action)
            case "create":
                self._create(action)
            case "own":
                value = self._world.new_key("own", self._worker)
                self._world.lineage[value].add(self._worker)
                self._mine.append((value, RRef(f"value of {value}")))
            case "fetch" | "share" | "pass on" | "actor":
                self._use(action)
            case "drop":
                if self._mine:
                    self._mine.pop(action.count % len(self._mine))
            case "train":
                training = Training(self._world, self._worker, action)
                self._using = training.key
                training.run()
            case "persist":
                persistence = Persistence(self._world, self._worker, action)
                self._using = persistence.key
                persistence.run()
            case "retry":
                Retries(self._world, self._worker, action).run()
            case "sleep":
                self._world.sim.sleep(action.seconds)
            case _:
                raise AssertionError(f"unknown action {action}")

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, service: str, route: list[str], *args: object, timeout: float = 0.0) -> None:
        key = self._world.new_key("call", self._worker)
        reached = rpc.rpc_sync(route[0], service, (key, route[1:], *args), timeout=timeout)
        self._check_route(key, reached, route)

    def _check_route(self, key: str, reached: list[str], route: list[str]) -> None:
        self._world.has_returned(key)
        if reached != route:
            self._world.violated(f"{key} returned {reached} instead of {route}")

    def _calls(self, action: Action) -> None:
        """Make several calls at the same time, and cancel the first one if the action says so."""
        route, made = list(action.workers), []
        for _ in range(action.count):
            key = self._world.new_key("call", self._worker)
            args = (key, route[1:], bytes(action.size))
            made.append((key, rpc.rpc_async(route[0], "@hop", args, timeout=action.timeout)))
        if action.flag:
            made[0][1].cancel()
        error: Exception | None = None
        for key, future in made:
            try:
                self._check_route(key, future.wait(), route)
            except TelegradError as caught:
                error = error or caught
        if error is not None:
            raise error

    def _fail(self, action: Action) -> None:
        key = self._world.new_key("failing call", self._worker)
        try:
            rpc.rpc_sync(action.workers[0], "@fail", (key,), timeout=0)
        except LookupError as error:
            self._world.has_returned(key)
            if key not in str(error):
                self._world.violated(f"{key} raised {error!r}")
        else:
            self._world.violated(f"{key} raised nothing")

    # -- references ---------------------------------------------------------------------------------------------

    def _create(self, action: Action) -> None:
        to = action.workers[0]
        value = self._world.new_key("value", self._worker)
        self._world.lineage[value].update((self._worker, to))
        if action.flag:
            self._world.actors.add(value)
        handle = rpc.remote(to, "@make", (value, action.flag, bytes(action.size)), timeout=0, ordered=action.flag)
        self._mine.append((value, handle))

    def _use(self, action: Action) -> None:
        world, route = self._world, list(action.workers)
        if not self._mine:
            self._create(action)
        value, handle = self._mine[action.count % len(self._mine)]
        self._using = value
        key = world.new_key(action.kind, self._worker)
        if action.kind == "fetch":
            self._check_value(value, handle.to_here(timeout=0))
            self._world.counts["fetched"] += 1
        elif action.kind == "share" and action.flag:
            future = rpc.rpc_async(route[0], "@use", (key, value, handle), timeout=0)
            if action.count > 2:  # dropped at once: the message is in flight, and must keep the value alive
                self._forget(value, handle)
                del handle
            self._check_value(value, future.wait())
            world.has_returned(key)
        elif action.kind == "share":
            rpc.rpc_sync(route[0], "@keep", (key, value, handle), timeout=0)
            world.has_returned(key)
            if action.count > 2:  # the other one keeps the value alive
                self._forget(value, handle)
        elif action.kind == "pass on":
            back = rpc.rpc_sync(route[0], "@pass_on", (key, value, route[1:], handle), timeout=0)
            world.has_returned(key)
            self._mine.append((value, back))
            self._check_value(value, back.to_here(timeout=0))
        else:
            self._note(action, value, handle)

    def _forget(self, value: str, handle: Handle) -> None:
        """Hold a reference no longer. Another program of this worker may have dropped it meanwhile."""
        if (value, handle) in self._mine:
            self._mine.remove((value, handle))

    def _check_value(self, value: str, got: object) -> None:
        if str(got) not in (f"value of {value}", value):
            self._world.violated(f"the reference to {value} gave {got!r}")

    def _note(self, action: Action, value: str, handle: Handle) -> None:
        """Call a method of an actor several times at once: the calls run in order."""
        if value not in self._world.actors:
            self._check_value(value, handle.to_here(timeout=0))
            return
        caller = f"{self._worker}/{self._number}"
        futures: list[tuple[str, int, Future[Any]]] = []
        for turn in range(action.count):
            self._noted += 1
            key = self._world.new_key("note", self._worker)
            load = bytes(action.size * (turn % 2))
            future = handle.rpc_async(timeout=0).note(key, caller, self._noted, load)
            futures.append((key, self._noted, future))
        error: Exception | None = None
        for key, number, future in futures:
            try:
                if future.wait() != number:
                    self._world.violated(f"{key} returned {future.wait()} instead of {number}")
                self._world.has_returned(key)
            except TelegradError as caught:
                error = error or caught
        if error is not None:
            raise error
