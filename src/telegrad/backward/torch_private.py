"""Every private call into torch that autograd needs, in one place, checked when it is imported.

If a release of torch drops one, this module says so at import, by name; nothing fails later in the middle of a pass.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import _C
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, graph
from torch.autograd.graph import GradientEdge, Node

from telegrad.interrupts import interruptible

_multi_grad_code = graph.register_multi_grad_hook.__code__

_missing = [
    name
    for name, there in (
        ("torch.autograd.Variable._execution_engine.run_backward", hasattr(Variable, "_execution_engine")),
        ("torch._C._ImperativeEngine", hasattr(_C, "_ImperativeEngine")),
        ("Variable._execution_engine.queue_callback", hasattr(Variable._execution_engine, "queue_callback")),
        ("Variable._execution_engine.is_checkpoint_valid", hasattr(Variable._execution_engine, "is_checkpoint_valid")),
        ("Tensor.grad_dtype", hasattr(torch.Tensor, "grad_dtype")),
        ("torch._C._storage_Use_Count", hasattr(_C, "_storage_Use_Count")),
        ("Tensor._use_count", hasattr(torch.Tensor, "_use_count")),
        ("Tensor._is_view", hasattr(torch.Tensor, "_is_view")),
        ("Tensor._backward_hooks", hasattr(torch.Tensor, "_backward_hooks")),
        ("Tensor._post_accumulate_grad_hooks", hasattr(torch.Tensor, "_post_accumulate_grad_hooks")),
        ("Node._sequence_nr", hasattr(_C._FunctionBase, "_sequence_nr")),
        ("Node._set_sequence_nr", hasattr(_C._FunctionBase, "_set_sequence_nr")),
        ("torch._C.DisableTorchFunctionSubclass", hasattr(_C, "DisableTorchFunctionSubclass")),
        ("torch._C._current_graph_task_id", hasattr(_C, "_current_graph_task_id")),
        ("torch._C._autograd._profiler_enabled", hasattr(_C._autograd, "_profiler_enabled")),
        ("torch._C._FunctionBase.apply", hasattr(_C._FunctionBase, "apply")),
        ("torch._C._are_functorch_transforms_active", hasattr(_C, "_are_functorch_transforms_active")),
        ("torch._C._autograd._set_creation_meta", hasattr(_C._autograd, "_set_creation_meta")),
        ("torch._C._autograd.CreationMeta", hasattr(_C._autograd, "CreationMeta")),
        ("torch._C._functorch.unwrap_if_dead", hasattr(_C._functorch, "unwrap_if_dead")),
        ("Node.metadata", hasattr(_C._FunctionBase, "metadata")),
        (
            "a _MultiHandle that register_multi_grad_hook(tensors) returns",
            hasattr(graph, "_MultiHandle")
            and "_MultiHandle" in _multi_grad_code.co_names
            and "tensors" in _multi_grad_code.co_varnames + _multi_grad_code.co_cellvars,
        ),
        ("torch._C._dynamo.eval_frame.set_code_exec_strategy", hasattr(eval_frame, "set_code_exec_strategy")),
        ("torch._C._dynamo.eval_frame._FrameExecStrategy", hasattr(eval_frame, "_FrameExecStrategy")),
        ("torch._C._dynamo.eval_frame._FrameAction", hasattr(eval_frame, "_FrameAction")),
    )
    if not there
]
if _missing:
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}, which telegrad's backward pass needs; "
        "install a release of telegrad that knows this torch"
    )

run_backward: Callable[
    [
        tuple[torch.Tensor | GradientEdge, ...],  # outputs
        tuple[torch.Tensor | None, ...],  # their gradients
        bool,  # keep the graph
        bool,  # create a graph
        tuple[torch.Tensor | GradientEdge, ...],  # inputs
        bool,  # inputs that cannot be reached are None, and no error
        bool,  # accumulate into .grad
    ],
    Sequence[torch.Tensor | None],
] = Variable._execution_engine.run_backward
"""Torch's own engine, without the checks that torch.autograd.grad makes again on every call (14 us against 39)."""


EngineBase = _C._ImperativeEngine
"""The class of torch's engine, as Python sees it: all its objects are the same engine."""


def use_engine(engine: Any) -> None:
    """Have Python code that runs the engine, or queues callbacks in it, do so through this object."""
    Variable._execution_engine = engine


def sequence_number(node: Node) -> int:
    """The engine's priority of a node: higher runs first."""
    return node._sequence_nr()


def set_sequence_number(node: Node, number: int) -> None:
    """Change the engine's priority of a node."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]  # private


def _counts_all_references(tensor: torch.Tensor) -> bool:
    """Whether `sys.getrefcount` counts the references of local variables and arguments, as it does before 3.14."""
    return sys.getrefcount(tensor) == 4  # held by: the caller's list, its variable, the argument, and getrefcount's


_held = [torch.zeros((), device="cpu")]
_tensor_held = _held[0]
_COUNTS_ALL = _counts_all_references(_tensor_held)
"""Where it is False nobody can tell who holds a gradient, so gradients are copied."""
del _held, _tensor_held


def nobody_else_holds(tensor: torch.Tensor, python_references: int) -> bool:
    """Whether a tensor, and its memory, belong to the caller alone, who has so many Python references to it.

    A view that has no graph may keep its base, if that is held by nothing else.
    """
    holders = 2  # the tensor, and the wrapper that untyped_storage makes
    if tensor._is_view() and not tensor.requires_grad:
        if _base_is_held(tensor):
            return False
        holders = 3
    return (
        _COUNTS_ALL
        and sys.getrefcount(tensor) <= python_references + 2  # this function's argument, and getrefcount's
        and tensor._use_count() == 1  # type: ignore[attr-defined]  # private
        and _C._storage_Use_Count(tensor.untyped_storage()._cdata) <= holders
    )


def _references_to_base(view: torch.Tensor) -> tuple[int, int]:
    """How many references, in Python and in C++, there are to what a view is a view of."""
    base: Any = view._base
    return sys.getrefcount(base), base._use_count()


# What torch and this function itself hold.
_UNHELD = _references_to_base(torch.zeros(2, 2, device="cpu").t())


def _base_is_held(view: torch.Tensor) -> bool:
    """Whether anything but the view holds its base."""
    in_python, in_cpp = _references_to_base(view)
    return in_python > _UNHELD[0] or in_cpp > _UNHELD[1]


def has_post_accumulate_hooks(leaf: torch.Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called on a leaf."""
    return bool(leaf._post_accumulate_grad_hooks)


@interruptible
def run_post_accumulate_hooks(leaf: torch.Tensor) -> None:
    """Call what `register_post_accumulate_grad_hook` registered, as AccumulateGrad does."""
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Where the gradient of a tensor goes. Torch asks a view of a leaf, and gets another node from most subclasses."""
    with _C.DisableTorchFunctionSubclass():
        return graph.get_gradient_edge(tensor)


engine_task: Callable[[], int] = _C._current_graph_task_id
"""The run of the engine whose node the current thread executes."""
NO_TASK = -1
profiled: Callable[[], bool] = _C._autograd._profiler_enabled
"""Whether a profiler watches this thread."""


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`Function.apply`, without what that asks of the class again on every call. No argument is a dead wrapper."""
    if _C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # defined in C


without_dead_wrapper: Callable[[torch.Tensor], torch.Tensor] = _C._functorch.unwrap_if_dead
"""A tensor that has outlived a transform of torch.func, as what it wraps; any other as it is."""


def allow_in_place(view: torch.Tensor) -> None:
    """Let a view that a Function returned be changed in place: its node passes its gradient on as it is."""
    _C._autograd._set_creation_meta(view, _C._autograd.CreationMeta.DEFAULT)


def call_directly(function: type[torch.autograd.Function]) -> type[Any]:
    """Have the engine call a Function's backward without looking for it each time; returns the class of its nodes."""
    node_class = backward_class(function)
    node_class.apply = function.backward
    return node_class


def backward_class(function: type[torch.autograd.Function]) -> type[Any]:
    """The class of the nodes that a Function makes."""
    return function._backward_cls


class Tie:
    """Stands for one call of `register_multi_grad_hook`; lives as long as one of its tensors has the hook."""

    __slots__ = ("__weakref__",)


_TIE = "telegrad_tie"
ties: set[weakref.ref[Tie]] = set()
"""All that live, in the whole process, as torch's graph is. Nearly always there is none."""


def _note_multi_grad_hook(tensors: Iterable[torch.Tensor], handles: Iterable[Any]) -> None:
    """Tie tensors together that have just got a multi-grad hook, because torch has no list of the hooks of a node."""
    tie = Tie()
    ties.add(weakref.ref(tie, ties.discard))
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_TIE, []).append(tie)
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None:
            setattr(hooks[handle.id], _TIE, tie)  # a leaf has no node of its own, and knows its hooks


def ties_of(node: Any) -> list[Tie]:
    """The ties of what a node made, or of the leaf that it accumulates for."""
    if node.next_functions:
        there: list[Tie] = node.metadata.get(_TIE, [])
        return there
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    hooks = () if leaf is None else (leaf._backward_hooks or {}).values()
    return [getattr(hook, _TIE) for hook in hooks if hasattr(hook, _TIE)]


def _watch_multi_grad_hooks() -> None:
    """Note every multi-grad hook that is registered from now on, in whichever way its user imported the function."""
    plain: Callable[..., None] = graph._MultiHandle.__init__

    @functools.wraps(plain)
    def __init__(self: Any, handles: tuple[Any, ...]) -> None:  # noqa: N807 - it replaces the one of that name
        plain(self, handles)
        frame: FrameType = sys._getframe(1)
        if frame.f_code is _multi_grad_code:
            _note_multi_grad_hook(frame.f_locals["tensors"], handles)

    graph._MultiHandle.__init__ = __init__  # type: ignore[method-assign]  # that is the point


_watch_multi_grad_hooks()


def break_graph_at(function: FunctionType, reason: str) -> None:
    """Have torch.compile break the graph at calls of a function; dynamo sees the attributes when it meets a call."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason


_UNTRACED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def run_as_written(code: CodeType) -> None:
    """Have torch.compile run the frames of this code, and all that they call, as they are.

    With `break_graph_at` this is torch.compiler.disable, without its wrapper and without loading torch._dynamo.
    """
    eval_frame.set_code_exec_strategy(code, _UNTRACED)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            run_as_written(inner)
