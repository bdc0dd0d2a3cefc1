"""The package itself: light to import, and complete."""

from __future__ import annotations

import inspect
import operator
import pydoc
import subprocess
import sys

import pytest
from tests.support.loaded_interpreter import run_loaded

import telegrad


def test_importing_the_package_does_not_load_torch() -> None:
    program = "import sys, telegrad; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_submodules_are_available_without_importing_them() -> None:
    program = "import telegrad; print(telegrad.errors.WorkerLost.__name__, telegrad.rpc.session.__name__)"
    done = run_loaded([sys.executable, "-c", program], timeout=60, check=True)
    assert done.stdout == "WorkerLost session\n"


def test_an_error_that_is_looked_for_in_the_package_is_found_in_its_module() -> None:
    with pytest.raises(AttributeError, match=r"did you mean telegrad\.errors\.WorkerLost\?"):
        operator.attrgetter("WorkerLost")(telegrad)
    with pytest.raises(AttributeError, match=r"did you mean telegrad\.nn\.split\?"):
        operator.attrgetter("split")(telegrad)
    with pytest.raises(AttributeError, match=r"did you mean telegrad\.autograd\.context\?"):
        operator.attrgetter("context")(telegrad)
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        operator.attrgetter("Nothing")(telegrad)


def test_the_names_that_are_looked_for_in_the_package_exist_elsewhere() -> None:
    for module, names in telegrad._ELSEWHERE.items():
        assert set(names) <= set(dir(getattr(telegrad, module)))


def test_a_misspelt_name_is_corrected_by_python() -> None:
    for name, meant in (("rpc_snyc", "rpc_sync"), ("launch.wrkers", "workers"), ("observe.profil", "profile")):
        with pytest.raises(AttributeError) as caught:
            operator.attrgetter(name)(telegrad)
        assert meant in dir(caught.value.obj)  # what Python looks through, for a name that is like this one
        assert caught.value.name == name.rpartition(".")[2]


def test_every_public_name_exists() -> None:
    for name in telegrad.__all__:
        assert getattr(telegrad, name) is not None


def test_dir_lists_every_public_name_and_submodule_without_loading_torch() -> None:
    program = "import sys, telegrad; print(*dir(telegrad)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    assert {*telegrad.__all__, "autograd", "nn", "optim", "rpc", "errors", "launch"} <= set(names.split())
    assert loaded == "False"


@pytest.mark.parametrize("module", ["", "rpc", "autograd", "optim", "nn", "launch", "recovery", "testing", "observe"])
def test_tab_completion_and_help_show_the_api_and_nothing_else(module: str) -> None:
    facade = operator.attrgetter(module)(telegrad) if module else telegrad
    modules = {
        "": telegrad._SUBMODULES,
        "launch": {"mpi", "ray", "slurm", "ssh", "torchrun"},
        "observe": {"attach", "otel", "record_trace"},
    }
    lazily = modules.get(module, set())
    expected = {name for name in (*facade.__all__, *lazily) if not name.startswith("_")}
    assert {name for name in dir(facade) if not name.startswith("_")} == expected
    text = pydoc.plain(pydoc.render_doc(facade))
    assert facade.__doc__.splitlines()[0] in text
    missing = [name for name in expected if name not in text]
    assert not missing


def test_tab_completion_of_the_errors_shows_only_errors() -> None:
    names = [name for name in dir(telegrad.errors) if not name.startswith("_")]
    assert {"WorkerLost", "TelegradError"} <= set(names)
    assert all(issubclass(getattr(telegrad.errors, name), telegrad.errors.TelegradError) for name in names)


def test_every_public_function_and_class_has_help() -> None:
    for module in (telegrad, telegrad.rpc, telegrad.autograd, telegrad.optim, telegrad.nn, telegrad.launch):
        for name in module.__all__:
            if callable(one := getattr(module, name)):
                assert inspect.getdoc(one), f"{module.__name__}.{name}"
