"""Makes actors that exist, of any class, members of a group, and lets them leave again.

The actors need no method for it: Ray's ``__ray_call__`` runs a function in the process of an actor. It runs between the
methods of the actor, so an actor joins, and leaves, when the methods that were called before have ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from telegrad.errors import TelegradError
from telegrad.launch.local_rendezvous import worker_names
from telegrad.launch.ray.rejoining import Rejoining

if TYPE_CHECKING:
    from telegrad.launch.ray.engine import Rendezvous
    from telegrad.launch.ray.membership import Membership
    from telegrad.options import Options
    from telegrad.protocol.membership import Member

_log = logging.getLogger("telegrad")

_LEAVE_WITHIN = 60.0
"""Seconds for an actor that was about to join again when the others left."""


@contextlib.contextmanager
def join(actors: Mapping[str, Any], driver: str | None = "driver", *, options: Options | None = None) -> Iterator[None]:
    """Make Ray actors the members of a group inside the block, by name, and this process as well.

    `driver` is the name of this process in the group, with id 0; None: it is not a member. Inside the block, the
    methods of the actors, and this process, use telegrad as after `init_rpc`. At the end, all leave with a graceful
    `shutdown`; if the block raises, they leave at once. Afterwards they may join again.

    An actor that Ray restarts (`max_restarts`) joins again under its name, and takes the place of the lost one:
    `telegrad.rpc.wait_for_worker` waits for it. `options` are those of `init_rpc`, for all.
    """
    from telegrad.default_agent import process_agent
    from telegrad.launch.ray.engine import Rendezvous, import_ray
    from telegrad.options import Options

    names = worker_names([*([] if driver is None else [driver]), *actors])
    agent = process_agent()
    if driver is not None and agent is not None:
        raise TelegradError(
            f"this process is already worker {agent.me.name!r}: call telegrad.rpc.shutdown() first, or pass driver=None"
        )
    import_ray()
    rendezvous = Rendezvous(names)
    try:
        joined = _JoinedActors(rendezvous, names, dict(actors), driver, options or Options())
        try:
            joined.enter()
            yield
        except BaseException:
            joined.leave(graceful=False)
            raise
        joined.leave(graceful=True)
    finally:
        rendezvous.close()


class _JoinedActors:
    """The actors of one `join`, as the driver sees them."""

    def __init__(
        self, rendezvous: Rendezvous, names: list[str], actors: dict[str, Any], driver: str | None, options: Options
    ) -> None:
        self._rendezvous = rendezvous
        self._names = names
        self._actors = actors
        self._is_member = driver is not None
        self._options = options
        self._rejoining = Rejoining(list(actors), self._ask, _judge)

    def _membership(self, name: str, restart: int = 0) -> Membership:
        return self._rendezvous.membership(self._names.index(name), restart)

    def _ask(self, name: str, restart: int, replaces: int) -> Future[bool]:
        """Ask an actor to join."""
        membership = self._membership(name, restart)
        call = self._actors[name].__ray_call__.remote(_enter_actor, membership, self._options, replaces)
        future: Future[bool] = call.future()
        return future

    def enter(self) -> None:
        """Let all join. Raises an error if one of them does not."""
        from telegrad.default_agent import default_agent
        from telegrad.launch.ray.membership import enter

        asked = {name: self._ask(name, 0, -1) for name in self._actors}
        for name, future in asked.items():
            future.add_done_callback(partial(self._report_death, name))
        if self._is_member:
            enter(self._membership(self._names[0]), self._options)
        for name, future in asked.items():
            error = future.exception()
            if error is not None:
                raise TelegradError(f"actor {name!r} could not join the group: {error}") from error
        if self._is_member:
            default_agent().peers.members.on_lost(self._on_lost)
        self._rejoining.start()

    def leave(self, *, graceful: bool) -> None:
        """Let all leave that have joined."""
        from telegrad.launch.ray.engine import first_sentence
        from telegrad.launch.ray.membership import leave

        self._rejoining.stop()
        key = self._rendezvous.key
        leaving: dict[str, Future[None]] = {}
        late: dict[str, Future[None]] = {}
        for name, actor in self._actors.items():
            # One that is asked to join again may find nobody. It gives up when the coordinator is gone.
            calls = late if name in self._rejoining.asked else leaving
            calls[name] = actor.__ray_call__.remote(_leave_actor, key, graceful).future()
        if self._is_member:
            leave(key, graceful=graceful)
        failed = {name: error for name, call in leaving.items() if (error := call.exception()) is not None}
        self._rendezvous.close()
        for name, call in late.items():
            try:
                call.exception(_LEAVE_WITHIN)
            except TimeoutError:
                _log.warning(
                    "actor %r was asked to join the group again, and has not left it within %g s", name, _LEAVE_WITHIN
                )
        failed = {name: error for name, error in failed.items() if _judge(error) == "failed"}
        if graceful and failed:
            texts = "; ".join(f"{name}: {first_sentence(error)}" for name, error in failed.items())
            raise TelegradError(f"actors could not leave the group in order: {texts}") from next(iter(failed.values()))

    def _on_lost(self, member: Member, reason: str) -> None:
        self._rejoining.lost(member.identity.name, member.identity.generation)

    def _report_death(self, name: str, future: Future[bool]) -> None:
        """If an actor has died, tell those that wait for it, because it cannot do so itself."""
        error = future.exception()
        if error is not None and _judge(error) != "failed":
            # Ray's thread must not wait for the store.
            arguments = self._membership(name), self._options, error
            threading.Thread(target=_report_death, args=arguments, name="telegrad-ray-report", daemon=True).start()


def _enter_actor(actor: object, membership: Membership, options: Options, replaces: int) -> bool:
    """Run in the process of an actor."""
    from telegrad.launch.ray.membership import enter

    return enter(membership, options, replaces)


def _leave_actor(actor: object, key: str, graceful: bool) -> None:
    """Run in the process of an actor."""
    from telegrad.launch.ray.membership import leave

    leave(key, graceful=graceful)


def _report_death(membership: Membership, options: Options, error: BaseException) -> None:
    from telegrad.launch.ray.engine import first_sentence
    from telegrad.launch.ray.membership import make_rendezvous, with_token
    from telegrad.rpc.group_rendezvous import group_keys

    who = f"worker {membership.name!r} (rank {membership.rank})"
    death = TelegradError(f"its actor is dead: {first_sentence(error)}")
    rendezvous = make_rendezvous(membership, options.init_timeout)
    rendezvous.failed(who, group_keys(with_token(options, membership.token)), death, of_another=True)


def _judge(error: BaseException) -> Literal["unavailable", "dead", "failed"]:
    """Say whether an error of a call means that the actor is not there."""
    import ray

    if isinstance(error, ray.exceptions.ActorDiedError):
        return "dead"
    return "unavailable" if isinstance(error, ray.exceptions.RayActorError) else "failed"
