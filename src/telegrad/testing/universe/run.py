"""Runs the universe of a seed."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial

from telegrad.errors import TelegradError
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.backward import SimulatedGroup
from telegrad.testing.programs import chosen, differences, draw_program, make_leaves, refusal, run_locally
from telegrad.testing.scheduler import SimulationStuck
from telegrad.testing.simulation import Faults
from telegrad.testing.universe.actions import Program
from telegrad.testing.universe.checker import check_membership, check_memory, check_record, check_threads, settle
from telegrad.testing.universe.injector import Injector
from telegrad.testing.universe.judge import objection
from telegrad.testing.universe.network import UniverseSimulation, place_of
from telegrad.testing.universe.plan import Action, Plan, draw_plan
from telegrad.testing.universe.services import Services
from telegrad.testing.universe.world import Violated, World

ENDING = 1500.0
"""Seconds of virtual time in which every program ends: a session takes a minute to give up, and programs make several
calls in a row."""


@dataclass(frozen=True)
class Report:
    """What a universe came to."""

    plan: Plan
    counts: Counter[str]
    story: str
    fingerprint: int
    """Equal for two runs of a seed that were identical, frame by frame."""
    seconds: float
    """How much virtual time passed."""


def run_seed(seed: int) -> Report:
    """Run the universe of a seed. Raises `Violated`, with the story, if a promise was broken."""
    _warm_up()
    return run_plan(draw_plan(seed))


@cache
def _warm_up() -> None:
    """Load what torch loads on first use, which leaves garbage: all runs of a seed in this process must be equal."""
    programs = (("w0", (Action("train", ("w1",)),)),)
    run_plan(replace(draw_plan(0), workers=("w0", "w1"), programs=programs, gathers=(), faults=(), autograd_program=1))


def run_plan(plan: Plan) -> Report:
    """Run a universe. Raises `Violated`, with the story, if a promise was broken."""
    # When garbage is collected must not depend on what ran before. Frozen objects make a collection fast.
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        result = _run(plan)
    finally:
        gc.collect()  # the universe, which no frame refers to: the next one would freeze it, and keep it for ever
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    if isinstance(result, str):
        raise Violated(result)
    return result


def _run(plan: Plan) -> Report | str:
    """Run a universe. Returns its description if a promise was broken: an error would keep the universe alive."""
    session = SessionSettings(request_credits=plan.credits)
    settings = AgentSettings(rpc_timeout=plan.rpc_timeout, session=session, fan_out=plan.fan_out)
    faults = Faults(longest_delay=plan.longest_delay)
    sim = UniverseSimulation(
        plan.seed, plan.workers, faults=faults, resumable=plan.resumable, settings=settings, is_open=plan.is_open
    )
    sim.network.reorders = plan.reorders
    world = World(plan, sim)
    try:
        with sim:
            sim.run(_Run(world).main)
    except SimulationStuck as stuck:
        world.violations.append(str(stuck))
    except AssertionError as error:
        world.violations.append(f"{error}: {error.__cause__!r}")
    finally:
        world.end()
    if world.violations:
        return describe(world)
    counts = world.counts + Counter(sim.network.counts)
    return Report(plan, counts, str(world.story), sim.network.fingerprint, sim.scheduler.now)


def describe(world: World) -> str:
    """Return the story of a universe that failed, and how to replay it."""
    broken = "\n".join(f"- {violation}" for violation in world.violations)
    return (
        f"{world.plan}\n{world.story}\n\nViolated:\n{broken}\n\n"
        f"Replay: python -m telegrad.testing.simulate --seed {world.plan.seed}"
    )


class _Run:
    """The main thread of a universe."""

    def __init__(self, world: World) -> None:
        self._world = world

    def main(self) -> None:
        """Run the programs and the faults, and check what they leave."""
        try:
            self._main()
        finally:
            self._world.is_over = True

    def _main(self) -> None:
        world, plan = self._world, self._world.plan
        for agent in world.sim.agents.values():
            Services(world, agent)
        if plan.autograd_program is not None:
            self._start_autograd(plan.autograd_program)
        for number, (worker, actions) in enumerate(plan.programs):
            world.threads.append(world.spawn(worker, partial(Program(world, worker, number).run, actions)))
        for worker in plan.workers:
            mine = [members for members in plan.gathers if worker in members]
            if mine:
                world.threads.append(world.spawn(worker, partial(self._gather, worker, mine)))
        injector = Injector(world)
        faults = world.sim.scheduler.start("", "faults", injector.run)
        self._join("programs")
        injector.is_over = True
        if not faults.join(world.sim.scheduler.now + ENDING):
            world.violated("the faults do not end")
        self._join("programs of restarted workers")
        injector.calm_down()
        for agent in world.sim.replaced:
            world.threads.append(world.sim.scheduler.start(place_of(agent), "close", agent.close))
        self._join("workers that were replaced")
        world.mine.clear()
        world.kept.clear()
        if not world.violations:
            settle(world)
        self._call_again()
        if not world.violations:
            check_memory(world)
        check_record(world)
        check_membership(world)
        if world.violations:
            return
        for worker in world.live():
            stop = partial(Program(world, worker, 0).shut_down, plan.shutdown_timeout)
            world.threads.append(world.spawn(worker, stop))
        self._join("shutdowns")
        if not world.violations:
            check_threads(world)

    def _call_again(self) -> None:
        """Let one worker call some others, when the faults are over: what is not lost must work again."""
        world = self._world
        here, *others = world.sim.random.sample(sorted(world.live()), min(3, len(world.live()))) or [""]
        known = [other for other in others if world.live()[here].peers.members.find(other) is not None]
        if known:
            action = Action("calls", tuple(known), count=3)
            world.threads.append(world.spawn(here, partial(Program(world, here, 12).run, (action,))))
            self._join("calls after the faults")
            settle(world)

    def _join(self, what: str) -> None:
        world = self._world
        give_up = world.sim.scheduler.now + ENDING
        for thread in world.threads:
            while not thread.killed and not thread.join(min(give_up, world.sim.scheduler.now + 5.0)):
                if world.sim.scheduler.now >= give_up:
                    world.violated(
                        f"{what} do not end: a thread of {thread.node} waits after {ENDING:g} s\n"
                        f"{world.sim.scheduler.stacks()}"
                    )
                    world.threads.clear()
                    return
        world.threads.clear()

    def _gather(self, worker: str, gathers: list[tuple[str, ...]]) -> None:
        program = Program(self._world, worker, 8)
        for members in gathers:
            program.gather(members)

    def _start_autograd(self, seed: int) -> None:
        world = self._world
        draw = random.Random(seed)
        features = chosen([name for name in ("inputs", "passes") if draw.random() < 0.3])
        program = draw_program(seed, most_workers=min(4, len(world.plan.workers)), features=features)
        names = list(world.plan.workers[: program.workers])
        group = SimulatedGroup(world.sim, names, program, make_leaves(program.leaves))

        def run() -> None:
            try:
                got = group.run()
            except KeyError as error:  # a worker whose gradients are wanted is dead
                if error.args[0] not in world.suspects:
                    raise
                return
            want = run_locally(program)
            refused = bool(refusal(got, want))
            earlier = want.error is None or len(got.results) < len(want.results)
            if earlier and isinstance(got.error, TelegradError) and not refused:
                world.story.add(names[0], "fails program: %s", str(got.error))
                world.counts["failed programs"] += 1
                if reason := objection(world, got.error, here=names[0]):
                    world.violated(f"the autograd program raised {got.error!r}\n  but {reason}")
                return
            apart = refused or not world.suspects.isdisjoint(names)
            for difference in differences(got, want, program, until_error=apart):
                world.violated(f"the autograd program differs from one process: {difference}\n{program}")
            world.counts["programs"] += 1

        world.threads.append(world.spawn(names[0], run))
