"""The simulated accelerator is compiled once and cached where nobody else can write."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from telegrad.errors import TelegradError
from telegrad.testing.accelerator import build

COMPILER = """#!/bin/sh
echo run >> "$LOG"
while [ "$1" != "-o" ]; do shift; done
echo library > "$2"
"""

BROKEN = """#!/bin/sh
for i in 1 2 3 4 5 6 7 8 9 10 11; do echo "line $i" >&2; done
exit 1
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an empty cache and a compiler that logs that it ran."""
    return {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LOG": str(tmp_path / "log"),
        "PATH": "/usr/bin:/bin",
        "CXX": script(tmp_path / "compiler", COMPILER),
    }


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def runs(environ: dict[str, str]) -> int:
    return len(Path(environ["LOG"]).read_text().splitlines())


def test_the_library_is_compiled_once(environ: dict[str, str]) -> None:
    library = build.build(environ)
    assert library.read_text() == "library\n"
    assert build.build(environ) == library
    assert runs(environ) == 1
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in library.parent.iterdir()) == sorted([library.name, "accelerator.lock"])


def test_concurrent_builds_compile_once(environ: dict[str, str]) -> None:
    threads = [threading.Thread(target=build.build, args=(environ,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs(environ) == 1


def test_a_changed_source_is_compiled_again(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build(environ)
    source = tmp_path / "library.cpp"
    source.write_text("// changed")
    monkeypatch.setattr(build, "SOURCE", source)
    assert build.build(environ) != first
    assert runs(environ) == 2


def test_without_a_compiler_the_reason_is_given(environ: dict[str, str]) -> None:
    build.build(environ)
    without = {"XDG_CACHE_HOME": environ["XDG_CACHE_HOME"], "PATH": "/nonexistent"}
    assert build.why_impossible(without) is None  # the cache has the library
    without["XDG_CACHE_HOME"] += "2"
    assert "no C++ compiler" in (build.why_impossible(without) or "")
    with pytest.raises(TelegradError, match=r"install one of c\+\+, g\+\+, clang\+\+, or set CXX"):
        build.build(without)
    without["CXX"] = "/nonexistent/c++"
    assert "no C++ compiler" in (build.why_impossible(without) or "")


def test_a_failed_build_shows_the_last_lines_of_the_compiler(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CXX"] = script(tmp_path / "broken", BROKEN)
    with pytest.raises(TelegradError, match=r"broken cannot compile(.|\n)*line 11") as caught:
        build.build(environ)
    assert "line 1\n" not in str(caught.value)
    assert [path.name for path in Path(environ["XDG_CACHE_HOME"], "telegrad").iterdir()] == ["accelerator.lock"]


def test_a_cache_that_others_can_write_to_is_refused(environ: dict[str, str]) -> None:
    directory = build.build(environ).parent
    directory.chmod(0o777)
    with pytest.raises(TelegradError, match=r"other users can write .*chmod 700"):
        build.build(environ)


def test_a_cache_that_is_a_link_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    Path(environ["XDG_CACHE_HOME"]).mkdir()
    Path(environ["XDG_CACHE_HOME"], "telegrad").symlink_to(tmp_path)
    with pytest.raises(TelegradError, match="has to be a directory of user id"):
        build.build(environ)


def test_a_cache_that_cannot_be_created_is_an_error_with_a_remedy(environ: dict[str, str], tmp_path: Path) -> None:
    environ["XDG_CACHE_HOME"] = str(tmp_path / "compiler")  # a file
    with pytest.raises(TelegradError, match="set XDG_CACHE_HOME"):
        build.build(environ)
