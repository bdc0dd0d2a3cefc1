"""The page over HTTP, as a browser and as a stranger would ask for it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from importlib.resources import files

import pytest
from tests.observe.dashboard.test_feed import Group

from telegrad.observe.dashboard.access import HEADERS
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.dashboard.server import Server
from telegrad.observe.metrics import GroupMetrics


@pytest.fixture
def server() -> Iterator[Server]:
    metrics = GroupMetrics()
    server = Server(Feed(Group().gather, interval=0.2, on_view=metrics.add), metrics=metrics.render)
    server.start()
    yield server
    server.close()


def get(server: Server, path: str, host: str | None = None, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers={"host": host or f"127.0.0.1:{server.port}", **headers})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def bearer(server: Server) -> str:
    return f"Bearer {server.access.token}"


@pytest.mark.parametrize(
    "path", ["/", "/updates", "/state.json", "/metrics", "/page/main.js", "/nothing", "/?token=wrong"]
)
def test_nothing_is_shown_without_the_token(server: Server, path: str) -> None:
    answer, body = get(server, path)
    assert answer.status == 401
    assert b"token" in body
    assert b"trainer" not in body


def test_a_foreign_host_header_is_refused_even_with_the_token(server: Server) -> None:
    answer, _ = get(server, "/", host=f"evil.example:{server.port}", authorization=bearer(server))
    assert answer.status == 421


def test_the_token_is_exchanged_for_a_cookie_that_opens_everything(server: Server) -> None:
    answer, body = get(server, f"/?token={server.access.token}")
    assert answer.status == 200
    assert b"<!doctype html>" in body
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    assert server.access.token not in cookie
    answer, _ = get(server, "/page/main.js", cookie=cookie)
    assert answer.status == 200
    assert answer.getheader("content-type") == "text/javascript; charset=utf-8"


def test_every_answer_has_the_security_headers_and_none_of_cors(server: Server) -> None:
    for headers in ({}, {"authorization": bearer(server), "origin": "http://evil.example"}):
        answer, _ = get(server, "/state.json", **headers)
        assert {name: answer.getheader(name) for name in HEADERS} == HEADERS
        assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]


def test_the_page_refers_only_to_files_of_the_package(server: Server) -> None:
    page = files("telegrad.observe.dashboard") / "page"
    texts = {entry.name: entry.read_text() for entry in page.iterdir()}
    for name, text in texts.items():
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in outside, name
        assert "https://" not in outside, name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{name} uses {word}, which could run what a worker calls a function"
    assert "<style" not in texts["index.html"]
    assert "onclick=" not in texts["index.html"]


def test_no_path_leads_out_of_the_package(server: Server) -> None:
    for path in ("/page/..%2Fapp.py", "/page/../app.py", "/page/%2Fetc%2Fpasswd"):
        answer, body = get(server, path, authorization=bearer(server))
        assert answer.status == 404
        assert b"import" not in body


def test_updates_are_a_state_and_then_changes(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", "/updates", headers={"authorization": bearer(server)})
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        lines = (answer.readline().decode().rstrip("\n") for _ in range(40))
        found = [line for line in lines if line.startswith("event: ")]
    finally:
        connection.close()
    assert found[0] == "event: state"
    assert "event: update" in found


def test_the_metrics_of_the_whole_group_are_served(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/updates", headers={"authorization": bearer(server)})
    answer = connection.getresponse()
    while not answer.readline().startswith(b"event: update"):
        pass  # the feed has looked
    connection.close()
    _, body = get(server, "/metrics", authorization=bearer(server))
    assert b'telegrad_calls_made_total{host="node0",worker="trainer"}' in body
    assert b"telegrad_duration_seconds_bucket" in body


def test_the_state_names_every_worker(server: Server) -> None:
    _, body = get(server, "/state.json", authorization=bearer(server))
    assert [worker["name"] for worker in json.loads(body)["snapshot"]["workers"]] == ["trainer", "stage0"]
