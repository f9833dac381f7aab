"""Requests to misbehaving servers, each a thread that sends what a test gives it."""

import contextlib
import json
import socket
import threading
import time

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.rl.http_client import Server

MOST_BYTES, TIMEOUT_SECONDS = 10_000, 0.4


def response(body=b'{"a": 1}', *headers, status="200 OK"):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def serving(*answers):
    """The port of a server that gives each connection the next answer, bytes or what makes them, and what it heard."""
    ended = threading.Event()

    def serve(listener):
        for answer in answers:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                received = piece = connection.recv(2**16)
                while piece and not received.endswith(b"}") and not received.startswith(b"GET"):
                    received += (piece := connection.recv(2**16))
                heard.append(received)
                for piece in [answer] if isinstance(answer, bytes) else answer():
                    connection.sendall(piece)
                    if ended.is_set():
                        break

    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1], heard
        ended.set()
        thread.join(10)


def server_at(port, **how):
    settings = {"attempts": 3, "wait_seconds": 0.01, "timeout_seconds": 20} | how
    return Server("rollout_url", f"http://me:se%40cret@127.0.0.1:{port}/v1/", **settings)


def post(server, ends=None):
    return server.post("/v1/do", {"b": 2}, most_bytes=MOST_BYTES, ends=ends or threading.Event())


def drip(head):
    def pieces():
        yield head
        while True:
            time.sleep(0.01)
            yield b"1"

    return pieces


def endless(piece):
    def pieces():
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        while True:
            yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"

    return pieces


def test_an_object_comes_back_and_the_password_goes_to_the_server_only():
    with serving(response(b'{"a": "\xc3\xa9"}', "Content-Type: application/json; charset=utf-8")) as (port, heard):
        server = server_at(port)
        assert post(server) == {"a": "é"}
    assert (server.name, server.path) == (f"rollout_url=http://127.0.0.1:{port}/v1", "/v1")
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/do HTTP/1.1\r\n")
    assert b"Authorization: Basic bWU6c2VAY3JldA==" in head
    assert json.loads(body) == {"b": 2}


@pytest.mark.parametrize(("answer", "wrong"), [
    (response(b"", "Location: http://127.0.0.1/other", status="302 Found"),
     "redirects to http://127.0.0.1/other (HTTP 302), which is not followed"),
    (response(b"", "Location: http://u:secret@elsewhere/v1/do", status="307 Temporary Redirect"),
     "redirects to http://elsewhere/v1/do (HTTP 307)"),
    (response(b"", status="308 Permanent Redirect"), "redirects to nowhere (HTTP 308)"),
    (response(b"no\nsuch\x1b[1m", status="404 Not Found"), r"refuses a request (HTTP 404: no\nsuch\x1b[1m)"),
    (response(b"x" * 5000, status="422 No"), f"refuses a request (HTTP 422: {'x' * 200}...)"),
    (response(b"<html>", "Content-Type: text/html"), "answers with text/html, not with application/json: <html>"),
    (response(b'{"a": 1', "Content-Type: application/json"), 'answers what is not a JSON object: {"a": 1'),
    (response(b"[1]"), "answers what is not a JSON object: [1]"),
    (response(b""), "answers what is not a JSON object: "),
    (response(b'{"a": "\xe9"}'), "answers what is not a JSON object: "),
    (response(b'{"a": ' * 1500 + b"1" + b"}" * 1500), "answers "),
    (response(b"[" * 9_000 + b"]" * 1_000), "answers what is not a JSON object: [["),
    (response(b'{"a": ' + b"1" * 6000 + b"}"), "answers what is not a JSON object: "),
    (response(b'{"a": "' + b"x" * MOST_BYTES + b'"}'), "answers with more than the 10,000 bytes that it may take"),
    (endless(b"x" * 4096), "answers with more than the 10,000 bytes that it may take"),
])  # fmt: skip
def test_an_answer_that_is_wrong_is_one_line_at_once(answer, wrong):
    with serving(answer) as (port, _), pytest.raises(UserError) as refused:
        post(server_at(port))
    (problem,) = refused.value.problems
    assert problem.startswith(f"rollout_url=http://127.0.0.1:{port}/v1: http://127.0.0.1:{port}/v1/do {wrong}")
    assert "secret" not in problem
    assert problem.isprintable()


@pytest.mark.parametrize(("answer", "why"), [
    (response(b"busy", status="503 Service Unavailable"), "HTTP 503: busy"),
    (response(b"", status="429 Too Many Requests"), "HTTP 429: "),
    (b"", "without response"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", "IncompleteRead"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}", "IncompleteRead"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n{}", "100 headers"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n{}", "65536"),
])  # fmt: skip
def test_what_may_pass_is_tried_again_and_told_in_the_end(answer, why):
    with serving(answer, answer, response()) as (port, heard):
        assert post(server_at(port)) == {"a": 1}
        assert len(heard) == 3
    with (
        serving(answer, answer) as (port, _),
        pytest.raises(UserError, match=r"gives no answer after 2 attempts") as told,
    ):
        post(server_at(port, attempts=2))
    assert why in str(told.value)
    assert str(told.value).isprintable()


@pytest.mark.parametrize("head", [
    b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n",
])  # fmt: skip
def test_an_answer_that_comes_letter_by_letter_is_given_up_in_time(head):
    started = time.monotonic()
    with serving(drip(head)) as (port, _), pytest.raises(UserError, match=r"after 1 attempt within 0\.4 s \(it took"):
        post(server_at(port, timeout_seconds=TIMEOUT_SECONDS))
    assert time.monotonic() - started < 20  # the server never stops sending


def test_a_request_that_nobody_waits_for_is_given_up():
    ends = threading.Event()
    with serving(drip(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")) as (port, _):
        threading.Timer(0.1, ends.set).start()
        with pytest.raises(UserError, match="gives no answer after 1 attempt"):
            post(server_at(port, timeout_seconds=600), ends)


@pytest.mark.parametrize("url", [
    "localhost:8000", "ftp://host/v1", "http://", "http://:8000/v1", "http://host:port/v1", "http://host:99999/v1",
    "http://[::1/v1", "http://ho st/v1", "http://host/v1\n", "http://host/v1?a=1", "http://host/v1#a", "http://hôst/v1",
    "http://me:secret@host:port/v1", "http://me:sec/ret@host/v1",
])  # fmt: skip
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UserError, match="is not the address of a server") as refused:
        Server("rollout_url", url, attempts=1, wait_seconds=0, timeout_seconds=1)
    assert "sec" not in str(refused.value).replace("second", "")
    assert str(refused.value).isprintable()


def test_a_get_is_asked_without_a_body():
    with serving(response()) as (port, heard):
        assert server_at(port).get("/v1/about?all=1", most_bytes=MOST_BYTES) == {"a": 1}
    assert heard[0].startswith(b"GET /v1/about?all=1 HTTP/1.1\r\n")
    assert b"Authorization: Basic" in heard[0]
    assert heard[0].endswith(b"\r\n\r\n")


def test_what_must_not_be_asked_twice_is_asked_once():
    with serving(response(b"{}", status="500 Internal Server Error")) as (port, heard):
        with pytest.raises(UserError, match=r"gives no answer after 1 attempt within .*HTTP 500"):
            server_at(port).post("/do", {}, most_bytes=MOST_BYTES, ends=threading.Event(), attempts=1)
    assert len(heard) == 1
