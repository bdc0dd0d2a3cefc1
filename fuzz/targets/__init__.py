"""All fuzz targets, by name."""

from __future__ import annotations

from fuzz.target import Target
from fuzz.targets.addresses import ADDRESSES
from fuzz.targets.frames import FRAMES
from fuzz.targets.handshake import HANDSHAKE
from fuzz.targets.joining import JOINING
from fuzz.targets.member import MEMBER
from fuzz.targets.messages import MESSAGES
from fuzz.targets.plain import PLAIN
from fuzz.targets.slabs import SLABS
from fuzz.targets.store import STORE
from fuzz.targets.tensors import TENSORS
from fuzz.targets.tls import TLS

_ALL = (FRAMES, MESSAGES, TENSORS, HANDSHAKE, SLABS, STORE, ADDRESSES, MEMBER, JOINING, PLAIN, TLS)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
