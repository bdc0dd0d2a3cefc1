"""The replaced modules have every name of torch's modules and classes, except those listed here with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.paths import SOURCES

# Prints {module: {name: None, or the names of a class}}. Excludes modules that torch's files import, and names that
# they import from elsewhere (typing, collections), but not names imported from torch's own RPC.
PROGRAM = """
import importlib, inspect, json, sys, types
import torch
if sys.argv[1] == "ours":
    import telegrad.drop_in
    telegrad.drop_in.install()
RPC = "torch.distributed.rpc"
MODULES = [RPC, *(RPC + "." + name for name in (
    "api backend_registry constants functions internal options _utils rref_proxy server_process_global_profiler "
    "_testing _testing.faulty_agent_backend_registry").split()),
    "torch.distributed.autograd", "torch.distributed.optim.optimizer", "torch.distributed.nn.api.remote_module",
    "torch._C._distributed_rpc", "torch._C._distributed_autograd", "torch._C._distributed_rpc_testing"]

def counts(value):
    if isinstance(value, types.ModuleType):
        return False
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__module__", "")).startswith(("torch._C._dist", "torch.distributed"))
    return True

def members(cls):
    names = set(dir(cls))
    for base in cls.__mro__:
        names |= set(base.__dict__.get("__annotations__", ()))
    return sorted(names)

found = {}
for name in MODULES:
    module = importlib.import_module(name)
    there = {key: getattr(module, key) for key in dir(module) if not key.startswith("__")}
    if sys.argv[1] == "theirs":
        there = {key: value for key, value in there.items() if counts(value)}
    submodules = {other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == name}
    there.update({key: getattr(module, key) for key in submodules if hasattr(module, key)})
    found[name] = {key: members(value) if isinstance(value, type) else None for key, value in there.items()}
json.dump(found, sys.stdout)
"""

IMPORT = "a variable for type checkers, or an import of torch's file, that means nothing outside of it"
LEFTOVER = "a helper, or a loop variable, of the code with which torch adds methods to its class RRef"
START = "a step of how torch's agent exchanges device maps when it starts; telegrad's init does that by itself"
SCRIPTED = "torch steps in TorchScript where it can; telegrad always steps in Python"
MADE = "a step of how torch makes, pickles or scripts its RemoteModule; telegrad's is made and sent otherwise"
PYBIND = "how C++ extensions exchange objects; these objects are Python's"
PICKLED = "it is pickled as Python's classes are"

MISSING = {
    "torch.distributed.rpc": {"method_factory": LEFTOVER, "new_method": LEFTOVER},
    "torch.distributed.rpc.api": {
        **dict.fromkeys(("method_factory", "new_method", "docstring", "method", "method_name"), LEFTOVER),
        **dict.fromkeys(("T", "TYPE_CHECKING", "_P", "_R"), IMPORT),
    },
    "torch.distributed.rpc.backend_registry": {
        **dict.fromkeys(
            (
                *("_create_device_list", "_create_reverse_mapping", "_get_device_infos", "_init_process_group"),
                *("_set_devices_and_reverse_device_map", "_tensorpipe_exchange_and_check_all_device_maps"),
                *("_tensorpipe_validate_devices", "_validate_device_maps"),
            ),
            START,
        ),
        "_backend_type_doc": "the text of a docstring",
    },
    "torch.distributed.autograd": {"TYPE_CHECKING": IMPORT},
    "torch.distributed.optim.optimizer": {
        **dict.fromkeys(
            (
                *("_ScriptLocalOptimizer", "_ScriptLocalOptimizerInterface", "_new_script_local_optimizer"),
                "functional_optim_map",
            ),
            SCRIPTED,
        ),
        "logger": "telegrad's optimizer logs as the rest of telegrad does, to the logger telegrad",
        "_LocalOptimizer.global_lock": "a step takes a turn and its parameters' locks, not one lock for all",
    },
    "torch.distributed.nn.api.remote_module": {
        **dict.fromkeys(
            (
                "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING",
                *("_SerializedRemoteModule", "_create_module", "_create_module_with_interface", "_grad_t"),
                *("_instantiate_template", "_internal_rpc_pickler", "_param_rrefs", "_raise_not_supported"),
                *("_recursive_script_module_receiver", "_recursive_script_module_reducer", "_remote_device"),
                *("_remote_module_receiver", "_remote_module_reducer"),
            ),
            MADE,
        ),
        **{
            f"{cls}.{name}": MADE
            for cls in ("RemoteModule", "_RemoteModule")
            for name in (
                *("_check_attribute_picklability", "_init_template", "_install_generated_methods", "_prepare_init"),
            )
        },
        "T": IMPORT,
    },
}
"""Missing names by module, with the reason: names, and members of classes as ``class.name``."""

MISSING_IN_ALL_CLASSES = {"_pybind11_conduit_v1_": PYBIND}
MISSING_IN_CLASS = {"WorkerInfo": {"__setstate__": PICKLED}}


def names(source: str) -> dict[str, dict[str, list[str] | None]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, source],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[str] | None]] = json.loads(done.stdout)
    return found


def test_every_name_of_torch_exists_or_is_listed_as_missing() -> None:
    theirs, ours = names("theirs"), names("ours")
    missing: dict[str, list[str]] = {}
    for module, expected in theirs.items():
        available = ours[module]
        absent = [name for name in expected if name not in available]
        for name, members in expected.items():
            present = available.get(name)
            if members is None or present is None:
                continue
            excused = {*MISSING_IN_ALL_CLASSES, *MISSING_IN_CLASS.get(name, ())}
            absent += [f"{name}.{member}" for member in members if member not in present and member not in excused]
        if absent:
            missing[module] = sorted(absent)
    listed = {(module, name) for module, names in MISSING.items() for name in names}
    found = {(module, name) for module, names in missing.items() for name in names}
    assert sorted(found - listed) == []  # missing but not listed
    assert sorted(listed - found) == []  # listed but not missing
