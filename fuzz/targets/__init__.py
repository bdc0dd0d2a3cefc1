"""All fuzz targets, by name."""

from __future__ import annotations

from importlib.util import find_spec

from fuzz.target import Target
from fuzz.targets.addresses import ADDRESSES
from fuzz.targets.frames import FRAMES
from fuzz.targets.handshake import HANDSHAKE
from fuzz.targets.member import MEMBER
from fuzz.targets.messages import MESSAGES
from fuzz.targets.slabs import SLABS
from fuzz.targets.store import STORE
from fuzz.targets.tensors import TENSORS

TARGETS: dict[str, Target] = {
    target.name: target for target in (FRAMES, MESSAGES, TENSORS, HANDSHAKE, SLABS, STORE, ADDRESSES, MEMBER)
}
if find_spec("telegrad.wire.plain_decode") is not None:
    from fuzz.targets.plain import PLAIN

    TARGETS[PLAIN.name] = PLAIN
if find_spec("telegrad.transport.tls_link") is not None:
    from fuzz.targets.tls import TLS

    TARGETS[TLS.name] = TLS
