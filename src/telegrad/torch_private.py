"""Every private name of torch that telegrad uses, checked at import.

If a release of torch drops one, this module says so at import, by name, and nothing fails later in the middle of a
pass. No other module of telegrad, except those of `drop_in` that replace private names of torch, uses such a name.

Attributes are read with `operator.attrgetter` and the like, which cost no call of a Python function.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import _C, _tensor, _utils
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, forward_ad, graph
from torch.autograd.graph import GradientEdge, Node
from torch.optim import optimizer as torch_optimizer

from telegrad.interrupts import interruptible

_multi_grad_code = graph.register_multi_grad_hook.__code__

_NEEDED: Sequence[tuple[str, object, Sequence[str]]] = (
    ("torch", torch, ("_neg_view", "_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor")),
    (
        "torch._C",
        _C,
        (
            *("Future", "_ImperativeEngine", "_storage_Use_Count", "_current_graph_task_id"),
            *("DisableTorchFunctionSubclass", "_DisableTorchDispatch", "_disabled_torch_function_impl"),
            *("_are_functorch_transforms_active", "_is_any_autocast_enabled"),
            *("_is_multithreading_enabled", "_set_multithreading_enabled"),
            *("_len_torch_function_stack", "_push_on_torch_function_stack", "_pop_torch_function_stack"),
            *("_len_torch_dispatch_stack", "_push_on_torch_dispatch_stack", "_pop_torch_dispatch_stack"),
        ),
    ),
    (
        "torch._C._autograd",
        _C._autograd,
        ("_profiler_enabled", "_get_creation_meta", "_set_creation_meta", "CreationMeta"),
    ),
    ("torch._C._functorch", _C._functorch, ("unwrap_if_dead", "is_functorch_wrapped_tensor")),
    ("torch._C._dynamo.eval_frame", eval_frame, ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")),
    (
        "torch.Tensor",
        torch.Tensor,
        (
            *("grad_dtype", "_version", "_use_count", "_is_view", "_base", "_is_zerotensor", "_indices", "_values"),
            *("_backward_hooks", "_post_accumulate_grad_hooks", "_make_subclass", "_make_wrapper_subclass"),
        ),
    ),
    ("Node", _C._FunctionBase, ("_sequence_nr", "_set_sequence_nr", "metadata", "apply")),
    ("torch.autograd.Variable", Variable, ("_execution_engine",)),
    (
        "torch.autograd.Variable._execution_engine",
        getattr(Variable, "_execution_engine", None),
        ("run_backward", "queue_callback", "is_checkpoint_valid"),
    ),
    ("torch.autograd.graph", graph, ("_MultiHandle",)),
    ("torch.autograd.forward_ad", forward_ad, ("_current_level",)),
    ("torch.optim.optimizer", torch_optimizer, ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
    ("torch.jit._state", torch.jit._state, ("_python_cu",)),
    ("torch._tensor", _tensor, ("_rebuild_from_type_v2", "_rebuild_from_type")),
    (
        "torch._utils",
        _utils,
        (
            *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
            *("_rebuild_parameter", "_rebuild_parameter_with_state"),
        ),
    ),
)


def _find_missing() -> list[str]:
    missing = [f"{where}.{name}" for where, owner, names in _NEEDED for name in names if not hasattr(owner, name)]
    if (
        "_MultiHandle" not in _multi_grad_code.co_names
        or "tensors" not in _multi_grad_code.co_varnames + _multi_grad_code.co_cellvars
    ):
        missing.append("a _MultiHandle that register_multi_grad_hook(tensors) returns")
    return missing


_missing = _find_missing()
if _missing:
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}, which telegrad needs; "
        "install a release of telegrad that supports this release of torch"
    )

# -- the engine -------------------------------------------------------------------------------------------------

run_backward: Callable[
    [
        tuple[torch.Tensor | GradientEdge, ...],  # outputs
        tuple[torch.Tensor | None, ...],  # their gradients
        bool,  # keep the graph
        bool,  # create a graph
        tuple[torch.Tensor | GradientEdge, ...],  # inputs
        bool,  # inputs that cannot be reached get None, instead of an error
        bool,  # accumulate into .grad
    ],
    Sequence[torch.Tensor | None],
] = Variable._execution_engine.run_backward
"""Torch's engine, without the checks that torch.autograd.grad makes on every call (14 us against 39)."""
EngineBase = _C._ImperativeEngine
"""The class of torch's engine object. All its instances are the same engine."""


def use_engine(engine: Any) -> None:
    """Make Python code that runs the engine, or queues callbacks in it, use this object."""
    Variable._execution_engine = engine


sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Returns the engine's priority of a node: higher runs first."""


def set_sequence_number(node: Node, number: int) -> None:
    """Set the engine's priority of a node."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]  # private


engine_task: Callable[[], int] = _C._current_graph_task_id
"""Returns the run of the engine whose node the current thread executes."""
NO_TASK = -1
profiled: Callable[[], bool] = _C._autograd._profiler_enabled
"""Returns whether a profiler watches this thread."""


def compiled_autograd_off() -> Any:
    """Return a context manager that turns compiled autograd off."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    # If it was not imported, it cannot be enabled; and importing it takes seconds.
    return contextlib.nullcontext() if compiled is None else compiled._disable()


def compiled_autograd_is_on() -> bool:
    """Return whether a backward on this thread may be compiled, and nodes are not called by torch's engine itself."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region)


engine_uses_threads: Callable[[], bool] = _C._is_multithreading_enabled
"""Returns whether a backward on this thread runs nodes of devices on threads of theirs."""
use_engine_threads: Callable[[bool], None] = _C._set_multithreading_enabled


# -- tensors ----------------------------------------------------------------------------------------------------

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""Returns the tensor that a tensor is a view of."""
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place."""
backward_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""Returns what `register_hook` registered on a tensor, if anything."""
post_accumulate_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""Returns what `register_post_accumulate_grad_hook` registered on a leaf, if anything."""
creation_of: Callable[[torch.Tensor], Any] = _C._autograd._get_creation_meta
"""Returns how a view was made, which decides whether it may be changed in place."""
DEFAULT_CREATION = _C._autograd.CreationMeta.DEFAULT
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Returns whether a tensor is torch's shorthand for zeros, without memory."""
coo_indices: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._indices
coo_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
make_per_tensor_quantized: Callable[..., torch.Tensor] = torch._make_per_tensor_quantized_tensor
make_per_channel_quantized: Callable[..., torch.Tensor] = torch._make_per_channel_quantized_tensor
make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = _C._disabled_torch_function_impl
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
without_dead_wrapper: Callable[[torch.Tensor], torch.Tensor] = _C._functorch.unwrap_if_dead
"""Returns what a tensor wraps that has outlived a transform of torch.func, and any other tensor itself."""
forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
"""Returns the level of forward-mode AD; -1 outside of it."""
jagged_sizes: Callable[[torch.Tensor], dict[str, torch.Tensor]] = attrgetter("_metadata_cache")
"""Returns what a jagged nested tensor remembers of its sizes."""
jagged_dimension: Callable[[torch.Tensor], int] = attrgetter("_ragged_idx")
"""Returns the ragged dimension of a jagged nested tensor."""

REBUILD_FROM_TYPE = (_tensor._rebuild_from_type_v2, _tensor._rebuild_from_type)
"""Functions with which torch unpickles a tensor of a subclass."""
REBUILD_FROM_STORAGE = (_utils._rebuild_tensor, _utils._rebuild_tensor_v2, _utils._rebuild_tensor_v3)
REBUILD_PARAMETER = (_utils._rebuild_parameter, _utils._rebuild_parameter_with_state)


def untyped(storage: Any) -> Any:
    """Return a storage without its dtype: one that has a dtype warns that it is deprecated."""
    return getattr(storage, "_untyped_storage", storage)


@interruptible
def run_post_accumulate_hooks(leaf: torch.Tensor) -> None:
    """Call what `register_post_accumulate_grad_hook` registered, as AccumulateGrad does."""
    for hook in list((post_accumulate_hooks(leaf) or {}).values()):
        hook(leaf)


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a tensor goes.

    Torch asks a view of a leaf, for which the ``__torch_function__`` of most subclasses would return another node.
    """
    with no_torch_function():
        return graph.get_gradient_edge(tensor)


def allow_in_place(view: torch.Tensor) -> None:
    """Let a view that a Function returned be changed in place: its node passes its gradient on unchanged."""
    _C._autograd._set_creation_meta(view, DEFAULT_CREATION)


# -- modes of the thread ----------------------------------------------------------------------------------------

no_torch_function = _C.DisableTorchFunctionSubclass
"""A context manager in which no ``__torch_function__`` of a subclass is called."""
no_torch_dispatch = _C._DisableTorchDispatch
"""A context manager in which no ``__torch_dispatch__`` is called."""
autocast_is_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
"""Returns whether the calling thread is in autocast, for any device."""
function_modes: Callable[[], int] = _C._len_torch_function_stack
"""Returns how many modes that see functions the calling thread is in. The default device is one."""
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
"""Returns how many modes that see operators the calling thread is in."""
push_function_mode = _C._push_on_torch_function_stack
pop_function_mode = _C._pop_torch_function_stack
push_dispatch_mode = _C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[None], Any] = _C._pop_torch_dispatch_stack

# -- Functions and their nodes ----------------------------------------------------------------------------------


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Do what `Function.apply` does, without its checks of the class. No argument may be a dead wrapper."""
    if _C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # defined in C


def call_directly(function: type[torch.autograd.Function]) -> type[Any]:
    """Make the engine call a Function's backward without looking it up each time. Returns the class of its nodes."""
    node_class = backward_class(function)
    node_class.apply = function.backward
    return node_class


def backward_class(function: type[torch.autograd.Function]) -> type[Any]:
    """Return the class of the nodes that a Function makes."""
    return function._backward_cls


# -- multi-grad hooks -------------------------------------------------------------------------------------------


class Tie:
    """One call of `register_multi_grad_hook`. Lives as long as one of its tensors has the hook."""

    __slots__ = ("__weakref__",)


_TIE = "telegrad_tie"
ties: set[weakref.ref[Tie]] = set()
"""All ties of the process. Nearly always there is none."""


def _note_multi_grad_hook(tensors: Iterable[torch.Tensor], handles: Iterable[Any]) -> None:
    """Tie tensors together that have just got a multi-grad hook: torch cannot list the hooks of a node."""
    tie = Tie()
    ties.add(weakref.ref(tie, ties.discard))
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_TIE, []).append(tie)
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None:
            setattr(hooks[handle.id], _TIE, tie)  # a leaf's node may die, but the leaf lists its hooks


def ties_of(node: Any) -> list[Tie]:
    """Return the ties of the tensor that a node made, or of the leaf that it accumulates for."""
    if node.next_functions:
        found: list[Tie] = node.metadata.get(_TIE, [])
        return found
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    hooks = () if leaf is None else (backward_hooks(leaf) or {}).values()
    return [getattr(hook, _TIE) for hook in hooks if hasattr(hook, _TIE)]


def _watch_multi_grad_hooks() -> None:
    """Note every multi-grad hook that is registered from now on, however its user imported the function."""
    plain: Callable[..., None] = graph._MultiHandle.__init__

    @functools.wraps(plain)
    def __init__(self: Any, handles: tuple[Any, ...]) -> None:  # noqa: N807 - it replaces the one of that name
        plain(self, handles)
        frame: FrameType = sys._getframe(1)
        if frame.f_code is _multi_grad_code:
            _note_multi_grad_hook(frame.f_locals["tensors"], handles)

    graph._MultiHandle.__init__ = __init__  # type: ignore[method-assign]  # that is the point


_watch_multi_grad_hooks()

# -- torch.compile and TorchScript ------------------------------------------------------------------------------


def break_graph_at(function: FunctionType, reason: str) -> None:
    """Make torch.compile break the graph at calls of a function. Dynamo reads the attributes when it traces a call."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason


_UNTRACED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def run_as_written(code: CodeType) -> None:
    """Make torch.compile run the frames of this code, and all that they call, uncompiled.

    With `break_graph_at` this is torch.compiler.disable, without its wrapper and without loading torch._dynamo.
    """
    eval_frame.set_code_exec_strategy(code, _UNTRACED)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            run_as_written(inner)


def find_script_function(qualified_name: str) -> object:
    """Return a TorchScript function that was compiled in this process, or None."""
    return torch.jit._state._python_cu.find_function(qualified_name)


# -- futures and optimizers -------------------------------------------------------------------------------------

FutureBase = _C.Future
"""The C class under torch.futures.Future."""


def must_be_annotated(optimizer: Any) -> bool:
    """Whether torch's wrapper of `Optimizer.step` matters: a profiler watches, or a hook is registered."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or profiled()
    )
