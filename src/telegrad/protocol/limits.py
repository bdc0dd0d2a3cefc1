"""How long a session waits, how much it keeps, and how many requests may be under way: its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The limits of a session: times in seconds, sizes in bytes. Both sides need the same request limits."""

    heartbeat_interval: float = 5.0
    """Looked at this often: a PING goes out if no frame was sent since the last look, so quiet lasts less than two."""
    silence_limit: float = 30.0
    """Nothing heard for so long: the connection is cut and resumed. Also how long our goodbye waits for the answer."""
    refuse_limit: float = 1.0
    """Every attempt refused for so long: nobody listens there any more, the peer is lost."""
    resume_limit: float = 30.0
    """Broken for so long, or resumed again and again with nothing getting through: the peer is lost."""
    reconnect_backoff: float = 0.02
    reconnect_backoff_limit: float = 0.5
    """Pauses between attempts double up to this. A connection that lived shorter counts as a failed attempt."""
    ack_every_frames: int = 16
    ack_every_bytes: int = 8 << 20
    ack_delay: float = 0.02
    max_unacked_time: float = 10.0
    """No ack moved a lane that waits for one for so long, and the peer is heard even then: they were swallowed."""
    request_credits: int = 1024
    request_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"session setting {field.name} must be above zero, not {getattr(self, field.name)}")
        if self.silence_limit <= 2 * self.heartbeat_interval:
            raise ValueError(
                f"silence_limit ({self.silence_limit:g} s) must be more than twice heartbeat_interval "
                f"({self.heartbeat_interval:g} s), or healthy idle connections are cut"
            )
