"""The settings of a session: how long it waits, when it acknowledges, and how many requests may be in flight."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The limits of a session: times in seconds, sizes in bytes. Both sides need the same request limits."""

    heartbeat_interval: float = 5.0
    """How often to check for idleness. A PING is sent if no frame was sent since the last check, so a healthy
    connection is silent for less than two intervals."""
    silence_limit: float = 30.0
    """If nothing is received for this long, the connection is closed and the session resumed. Also the limit for the
    peer's answer to a goodbye."""
    refuse_limit: float = 1.0
    """If every attempt to connect is refused for this long, the peer is lost."""
    resume_limit: float = 30.0
    """If the connection stays broken for this long, or no frame gets through after resuming, the peer is lost."""
    reconnect_backoff: float = 0.02
    reconnect_backoff_limit: float = 0.5
    """Pauses between attempts double up to this. A connection that lived shorter counts as a failed attempt."""
    ack_every_frames: int = 16
    ack_every_bytes: int = 8 << 20
    ack_delay: float = 0.02
    max_unacked_time: float = 10.0
    """If a lane gets no acknowledgement for this long although the peer sends frames, its frames were lost on the way:
    the connection is closed and the session resumed."""
    request_credits: int = 1024
    request_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"session setting {field.name} must be above zero, not {getattr(self, field.name)}")
        if self.silence_limit <= 2 * self.heartbeat_interval:
            raise ValueError(
                f"silence_limit ({self.silence_limit:g} s) must be more than twice heartbeat_interval "
                f"({self.heartbeat_interval:g} s), or idle connections that are healthy would be closed"
            )
