"""An encoded value: what a codec makes of arguments, results and errors, before tensors get their places."""

from __future__ import annotations

import pickle

import msgspec
import torch

from telegrad.wire.reference import Reference

Attachment = torch.Tensor | pickle.PickleBuffer


class Encoded(msgspec.Struct, frozen=True):
    """An encoded value, and the attachments that it refers to by their order."""

    data: bytes
    attachments: list[Attachment]
    module_leaves: frozenset[int] = frozenset()
    """Indices of attachments that belong to an ``nn.Module`` in the value. They become leaves of the receiver."""
    references: tuple[tuple[int, Reference], ...] = ()
    """Each with its index among the attachments and references."""
    modules: tuple[torch.nn.Module, ...] = ()
    """Modules in the value that have parameters which require grad."""
