"""Programs that a process starts have the drop-in too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import SOURCES

from telegrad.drop_in.subprocesses import AUTOLOAD, environment, install_in_subprocesses


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_autoload_directory_is_prepended_to_pythonpath() -> None:
    paths = environment({"PYTHONPATH": f"/a{os.pathsep}/b"})["PYTHONPATH"].split(os.pathsep)
    assert paths[:3] == [AUTOLOAD, "/a", "/b"]


def test_installing_in_subprocesses_twice_changes_nothing() -> None:
    environ = {"PYTHONPATH": "/a"}
    install_in_subprocesses(environ)
    once = dict(environ)
    install_in_subprocesses(environ)
    assert environ == once


def test_a_child_can_import_telegrad() -> None:
    assert SOURCES in environment({})["PYTHONPATH"].split(os.pathsep)


def test_a_child_that_does_not_use_torch_loads_neither_torch_nor_telegrad() -> None:
    program = "import sys; print('torch' in sys.modules, 'telegrad' in sys.modules)"
    done = run("-c", program, **environment())
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_a_shadowed_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.seen = __file__\n")
    environ = environment({"PYTHONPATH": str(tmp_path)})
    done = run("-c", "import sys; print(seen); print(sys.modules['sitecustomize'].__file__)", **environ)
    assert done.stdout.splitlines() == [str(tmp_path / "sitecustomize.py")] * 2


# In the place of torch and telegrad, which take seconds to load: all that matters here is who calls whom.
FAKES = {
    "torch.py": "installed = False",
    "telegrad/__init__.py": "",
    "telegrad/drop_in.py": "import torch\n\ndef install():\n    torch.installed = True",
    "check.py": "import torch\n\ndef which():\n    return torch.installed",
}

PARENT = """
import multiprocessing, subprocess, sys
from check import which

if __name__ == "__main__":
    print("here", which())
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.apply(which))
    program = [sys.executable, "-c", "import check; print('subprocess', check.which())"]
    print(subprocess.run(program, capture_output=True, text=True).stdout.strip())
"""


def test_every_kind_of_child_process_has_the_drop_in(tmp_path: Path) -> None:
    (tmp_path / "telegrad").mkdir()
    for name, content in {**FAKES, "parent.py": PARENT}.items():
        (tmp_path / name).write_text(content)
    parent = str(tmp_path / "parent.py")
    ways = ("here", "fork", "spawn", "forkserver", "subprocess")
    without = run(parent, PYTHONPATH=str(tmp_path))
    assert (without.stdout.splitlines(), without.stderr) == ([f"{way} False" for way in ways], "")
    done = run(parent, **environment({"PYTHONPATH": str(tmp_path)}))
    assert (done.stdout.splitlines(), done.stderr) == ([f"{way} True" for way in ways], "")


def test_an_unmodified_program_runs_with_the_drop_in(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("name = 'helper'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, helper, torch.distributed.rpc as rpc\n"
        "print(__name__, sys.argv, helper.name, rpc.__name__, sys.modules['__main__'].__file__)\n"
        "sys.exit(3)\n"
    )
    done = run("-m", "telegrad.drop_in", str(script), "--flag", "x", PYTHONPATH=SOURCES)
    argv = [str(script), "--flag", "x"]
    assert done.stdout == f"__main__ {argv} helper telegrad.drop_in.rpc {script}\n"
    assert done.returncode == 3


def test_a_module_or_a_command_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:])\n")
    paths = os.pathsep.join([SOURCES, str(tmp_path)])
    assert run("-m", "telegrad.drop_in", "-m", "module", "a", PYTHONPATH=paths).stdout == "['a']\n"
    assert run("-m", "telegrad.drop_in", "-c", "print(1)", PYTHONPATH=paths).stdout == "1\n"


def test_the_usage_is_shown_without_a_program() -> None:
    nothing = run("-m", "telegrad.drop_in", PYTHONPATH=SOURCES)
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("usage: python -m telegrad.drop_in SCRIPT")
    asked = run("-m", "telegrad.drop_in", "--help", PYTHONPATH=SOURCES)
    assert (asked.returncode, asked.stderr) == (0, "")
