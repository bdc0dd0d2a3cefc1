from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from telegrad import cli
from telegrad.errors import TelegradError
from telegrad.observe import local_socket
from telegrad.observe.commands.dashboard import given_token
from telegrad.testing.group import local_group


def test_a_token_that_can_be_guessed_is_refused() -> None:
    assert given_token({}) is None
    assert given_token({"TELEGRAD_DASHBOARD_TOKEN": "x" * 20}) == "x" * 20
    for short in ("secret", "é" * 30, "x\n" * 15):
        with pytest.raises(TelegradError, match="telegrad token"):
            given_token({"TELEGRAD_DASHBOARD_TOKEN": short + "."})


def test_no_group_is_an_error_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", "--no-open", "--runtime-dir", str(tmp_path)]) == 1
    assert "telegrad dashboard: no group of this user runs here. Set TELEGRAD_RUNTIME_DIR" in capsys.readouterr().err


def test_it_shows_a_group_and_ends_with_ctrl_c() -> None:
    with local_group(["a", "b"]) as agents:
        local_socket.listen(agents["a"])
        directory = os.path.dirname(agents["a"].me.addresses[0].removeprefix("unix://"))
        command = [sys.executable, "-m", "telegrad.cli", "dashboard", "--no-open", "--json", "--runtime-dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0]
            lines = [process.stdout.readline() for _ in range(3)]
            url = urlsplit(json.loads("".join(lines))["url"])
            connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=30)
            connection.request("GET", f"/updates?{url.query}")
            answer = connection.getresponse()
            line = answer.readline()
            while b'"name":"b"' not in line:
                line = answer.readline()
            connection.close()
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()
            process.communicate()
