"""The nodes that telegrad adds to torch's graph: sends and recvs.

A *send* (`SendRpcBackward`) is one message with tensors that need gradients. It has a *token* for each of them: a node
whose edge is the tensor, and whose backward returns the gradient that was received for it. If they are many, one node
holds the edges of all, and tokens are made for the passes that need them, which are few. A *recv*
(`RecvRpcBackward`) is the node of the tensors of one received message. Its backward sends their gradients. For
gates see `telegrad.backward.gates`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from telegrad.errors import ProtocolError, TelegradError
from telegrad.torch_private import (
    allow_in_place,
    apply,
    base_of,
    call_directly,
    compiled_autograd_off,
    profiled,
    sequence_number,
    set_sequence_number,
    without_dead_wrapper,
)

if TYPE_CHECKING:
    from telegrad.backward.contexts import DistAutogradContext

ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""The leaf behind every recv, which makes the engine execute the recv. It never gets a gradient."""
ANCHOR_NODE: Node = torch.autograd.graph.get_gradient_edge(ANCHOR).node
ONE = torch.ones((), device="cpu")
_NOTHING = torch.zeros((), device="cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
MANY = 4
"""So many tensors of a send share one node, which takes less time than the same number of tokens."""


def record(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a Function in modes of torch in which nodes are made. Most threads are in them, and entering is slow."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return apply(function, *args)
    with torch.inference_mode(False), torch.enable_grad():
        return apply(function, *args)


def has_edge(view: torch.Tensor) -> bool:
    """Whether a gradient can flow into a view. One that was made under no_grad requires grad if its base does, and yet
    has no edge."""
    with torch.inference_mode(False), torch.enable_grad():
        node = view.view_as(view).grad_fn
    return node is not None and node.next_functions[0][0] is not None


class SendRpc(torch.autograd.Function):
    """A token. A profiler shows its node as ``SendRpcBackward``."""

    @staticmethod
    def forward(ctx: Any, send: SendRpcBackward, index: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.send, ctx.index = send, index
        ctx.materialize_grads = False  # as set_materialize_grads does, which is a Python function
        return _NOTHING.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, ctx.send.grad_of(ctx.index)


call_directly(SendRpc)


class _SendMany(torch.autograd.Function):
    """The edges of many sent tensors. The engine never executes its node.

    It saves the tensors without their memory: what it has saved are scalars with the same edges.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return _NOTHING.clone()


def _edges_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the output of one node with the edges of these tensors, or None where each needs a token of its own.

    Those are tensors whose class may notice, and modes that look at nodes or at what they save.
    """
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return None
    if torch.is_anomaly_enabled() or profiled():
        return None
    try:
        with saved_tensors_hooks(type, _without_memory):  # a builtin, because it is called for each tensor
            output: torch.Tensor = record(_SendMany, *map(without_dead_wrapper, tensors))
    except RuntimeError:  # in a transform, or in a block in which nothing may be saved
        return None
    return output


def _without_memory(_: object) -> torch.Tensor:
    return _NOTHING


class SendRpcBackward:
    """One message with tensors that need gradients, on the worker that sent it.

    It has no inputs in the local graph: gradients are set when they arrive, and the tokens return them to the engine.
    """

    def __init__(self, message: int, order: int, target: int, tensors: Sequence[torch.Tensor]) -> None:
        self.message = message
        self.order = order
        """Its number in this worker's record order."""
        self.target = target
        """The worker that it was sent to."""
        self._grads: list[torch.Tensor | None] | None = None
        self._tokens: list[Any] = []  # all of them, unless there are edges
        self._edges = _edges_of(tensors) if len(tensors) >= MANY else None
        self.count = len(tensors)
        """How many tensors were sent; 0 when it is released."""
        # Shape, dtype and device of each in turn: Python's garbage collector would visit tuples, and equal shapes, too.
        self._expected: list[Any] = []
        tokens: list[Any] = []
        if self._edges is None:
            for index, tensor in enumerate(tensors):
                self._expected += tensor.shape, tensor.dtype, tensor.device
                tokens.append(record(SendRpc, self, index, without_dead_wrapper(tensor)))
        else:
            shapes: dict[torch.Size, torch.Size] = {}
            for tensor in tensors:
                shape = tensor.shape
                self._expected += shapes.setdefault(shape, shape), tensor.dtype, tensor.device
        # Not earlier: tokens hold their send, and after an error nobody would break the cycle.
        self._tokens = tokens

    def __len__(self) -> int:
        return self.count

    def tokens(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the tokens of these tensors. Those that are made now belong to the caller: they hold this send."""
        edges = self._edges
        if edges is None:
            tokens = self._tokens
            return tokens if len(indices) == len(tokens) else [tokens[index] for index in indices]
        node: Any = edges.grad_fn
        stand_ins, priority, made = node.saved_tensors, sequence_number(node), []
        for index in indices:
            token = record(SendRpc, self, index, stand_ins[index])
            set_sequence_number(token.grad_fn, priority)  # as if it had been made with the send
            made.append(token)
        return made

    def expected(self) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
        """Return shape, dtype and device of each tensor that was sent."""
        each = iter(self._expected)
        return list(zip(each, each, each, strict=True))

    def release(self) -> None:
        """Let go of the graph. Tokens hold their send, so this breaks a reference cycle."""
        self._tokens, self._edges, self.count = [], None, 0
        self._grads = None

    def name(self) -> str:
        """Return PyTorch's name for the node."""
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """Return where the gradients go, as PyTorch does: the tensors' own nodes."""
        edges, tokens = self._edges, self._tokens  # one read of each: the context may end meanwhile
        if edges is not None:
            node: Any = edges.grad_fn
            return tuple(node.next_functions)
        return tuple([token.grad_fn.next_functions[0] for token in tokens])

    def edges(self, indices: Iterable[int]) -> list[tuple[Node, int]]:
        """Return where the gradients of these tensors go."""
        many, tokens = self._edges, self._tokens
        if many is not None:
            node: Any = many.grad_fn
            found = node.next_functions
            return [found[index] for index in indices]
        edges = []
        for index in indices:
            edges.append(tokens[index].grad_fn.next_functions[0])  # a comprehension would be one call more
        return edges

    def check(
        self, grads: Sequence[torch.Tensor | None], sender: int, receiver: int, name_of: Callable[[int], str]
    ) -> None:
        """Raise if these cannot be the gradients of what was sent."""
        if sender != self.target:
            fault = f"are refused, because it was sent to worker {name_of(self.target)!r}"
        elif len(grads) != self.count:
            fault = f"are {len(grads)}, but {self.count} tensors were sent"
        else:
            each = iter(self._expected)
            for index, (grad, shape, dtype, device) in enumerate(zip(grads, each, each, each, strict=True)):
                if grad is not None and (grad.shape != shape or grad.dtype != dtype):
                    fault = f"do not fit: number {index} is {grad.dtype} {list(grad.shape)}, not {dtype} {list(shape)}"
                    break
                if grad is not None and grad.device != device:
                    fault = f"do not fit: number {index} is on {grad.device}, not on {device}"
                    break
            else:
                return
        raise ProtocolError(
            f"the gradients that worker {name_of(sender)!r} sent for message {self.message:#x} of worker "
            f"{name_of(receiver)!r} {fault}"
        )

    def set_grads(self, grads: list[torch.Tensor | None] | None) -> None:
        """Set the gradients that the tokens return in the next run; None removes them."""
        self._grads = grads

    def forget(self, grads: list[torch.Tensor | None]) -> None:
        """Remove these gradients, unless others were set since."""
        if self._grads is grads:
            self._grads = None

    def get_grads(self) -> list[torch.Tensor | None]:
        """Return the gradients that the tokens return."""
        if self._grads is None:
            raise TelegradError(f"the gradients of message {self.message:#x} have not arrived")
        return self._grads

    def grad_of(self, index: int) -> torch.Tensor | None:
        """Return the gradient of one token, and forget it, so its receiver may keep it without a copy."""
        grads = self.get_grads()
        grad, grads[index] = grads[index], None
        return grad

    setGrads = set_grads  # noqa: N815 - PyTorch's name
    getGrads = get_grads  # noqa: N815 - PyTorch's name


class Recv:
    """One received message with tensors that need gradients: the data of its node."""

    __slots__ = (
        *("context", "context_id", "count", "devices", "hooked", "incarnation"),
        *("message", "node", "order", "source", "source_name"),
    )

    def __init__(
        self,
        context: DistAutogradContext | None,
        context_id: int,
        message: int,
        source: int,
        name: str,
        devices: Sequence[str] = (),
        incarnation: int = 0,
    ) -> None:
        self.incarnation = incarnation  # of the sender
        self.context = weakref.ref(context) if context is not None else None
        self.context_id = context_id
        self.message = message
        self.source = source
        self.source_name = name
        self.devices = devices
        """The devices of the sender that the gradients go to; empty if it is the CPU for all of them."""
        self.count = 0
        self.order = 0
        """Its number in this worker's record order."""
        self.hooked = False
        """Whether its node had hooks that are called after it."""
        self.node: Any = None
        """The node in the graph, until the context ends, which breaks this reference cycle."""


class RecvRpcBackward(torch.autograd.Function):
    """The node of the tensors of one received message. Its backward sends their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        own_anchor: torch.Tensor,
        recv: Recv,
        propagate: Callable[..., None],
        tensors: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.recv, ctx.propagate = recv, propagate
        ctx.materialize_grads = False  # as set_materialize_grads does, which is a Python function
        recv.count = len(tensors)
        return tuple(tensors)  # as a list they are not inputs to torch, which would make views of them

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.propagate(ctx, grads)
        return None, None, None, None, None


RECV_NODE = call_directly(RecvRpcBackward)
RECV_NODE.name = lambda self: "torch::distributed::autograd::RecvRpcBackward"
_register_hook: Callable[[Any, Any], Any] = RECV_NODE.register_hook


def _register_and_note_hook(node: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook that is called after a recv node. Torch does not tell whether there is one."""
    node.recv.hooked = True
    return _register_hook(node, hook)


RECV_NODE.register_hook = _register_and_note_hook


class _ViewInMessage(torch.autograd.Function):
    """The node of a received tensor that is a view of another one of its message.

    Torch relates a view to its base only if the view is the first output of its node, so it cannot be an output of the
    message's `RecvRpcBackward`. This node leads there.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, view: list[torch.Tensor]) -> torch.Tensor:
        ctx.materialize_grads = False  # as set_materialize_grads does, which is a Python function
        return view[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def receive(
    recv: Recv,
    propagate: Callable[[Any, Sequence[torch.Tensor | None]], None],
    tensors: Sequence[torch.Tensor],
    anchor: torch.Tensor = ANCHOR,
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a received message, which have no history, as outputs of one `RecvRpcBackward` node.

    `anchor` is an anchor that no other recv of the context has, because a pass with inputs executes only some recvs.
    """
    outputs: tuple[torch.Tensor, ...] = record(RecvRpcBackward, ANCHOR, anchor, recv, propagate, tensors)
    return outputs


def _held_by_engine() -> int:
    """Return how many Python references to a gradient there are while its recv node is executed, if nobody keeps it."""
    counts: list[int] = []

    def count(_: Any, grads: Sequence[torch.Tensor | None]) -> None:
        counts.append(sys.getrefcount(grads[0]) - 1)  # without the argument of getrefcount

    with torch.inference_mode(False), torch.enable_grad(), compiled_autograd_off():
        (tensor,) = receive(Recv(None, 0, 0, 0, ""), count, [torch.ones(1, device="cpu")])
        torch.autograd.grad(tensor * 2, [ANCHOR], allow_unused=True)
    return counts[0]


HELD_BY_ENGINE = _held_by_engine()


def new_anchor() -> torch.Tensor:
    """Make a leaf that never gets a gradient."""
    return torch.zeros((), requires_grad=True, device="cpu")


def own_anchor(node: Any) -> tuple[Node, int]:
    """Return the edge to the anchor that a recv shares with no other of its context."""
    edge: tuple[Node, int] = node.next_functions[1]
    return edge


def receive_views(
    recv: Recv,
    propagate: Callable[[Any, Sequence[torch.Tensor | None]], None],
    tensors: Sequence[torch.Tensor],
    anchor: torch.Tensor = ANCHOR,
) -> tuple[torch.Tensor, ...]:
    """Do what `receive` does where tensors are views of others. In-place operations on them are recorded as usual.

    Torch refuses in-place changes of views whose base is not among the tensors.
    """
    related = [any(base_of(tensor) is other for other in tensors) for tensor in tensors]
    plain = [tensor.detach() if is_view else tensor for tensor, is_view in zip(tensors, related, strict=True)]
    outputs = list(receive(recv, propagate, plain, anchor))
    for index, is_view in enumerate(related):
        if is_view:
            outputs[index] = record(_ViewInMessage, outputs[index], [tensors[index]])
            allow_in_place(outputs[index])
    return tuple(outputs)


def node_of(received: torch.Tensor) -> Any:
    """Return the `RecvRpcBackward` node of a tensor that `receive_views` returned."""
    node = received.grad_fn
    return node if type(node) is RECV_NODE or node is None else node.next_functions[0][0]
