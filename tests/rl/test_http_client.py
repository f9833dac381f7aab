"""Answers of servers that misbehave: each a thread that sends what a test gives it; and the completions in answers."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.post_training.servers import (
    Asked,
    Server,
    read_generation,
    read_vllm_completion,
)
from tests.tables import read_table


def response(body=b'{"a": 1}', *headers, status="200 OK"):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def serving(*answers):
    """The port of a server that gives each connection the next answer, bytes or what makes them, and what it heard."""
    ended = threading.Event()
    heard = []

    def serve(listener):
        for answer in answers:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                received = piece = connection.recv(2**16)
                while (
                    piece
                    and not received.endswith(b"}")
                    and not received.startswith(b"GET")
                ):
                    piece = connection.recv(2**16)
                    received += piece
                heard.append(received)
                for piece in [answer] if isinstance(answer, bytes) else answer():
                    connection.sendall(piece)
                    if ended.is_set():
                        break

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1], heard
        ended.set()
        thread.join(10)


def server_at(port, **how):
    settings = {"attempts": 3, "wait_seconds": 0.01, "timeout_seconds": 20} | how
    return Server(
        "rollout_url", f"http://me:se%40cret@127.0.0.1:{port}/v1/", **settings
    )


def ask(server, request):
    async def connected():
        async with server:
            return await request(server)

    return asyncio.run(connected())


def post(server, **how):
    return ask(server, lambda server: server.ask("POST", "/v1/do", {"b": 2}, **how))


def drip(head):
    def pieces():
        yield head
        while True:
            time.sleep(0.01)
            yield b"1"

    return pieces


@pytest.mark.fast
def test_an_object_comes_back_and_the_password_goes_to_the_server_only():
    answer = response(
        b'{"a": "\xc3\xa9"}', "Content-Type: application/json; charset=utf-8"
    )
    with serving(answer, answer) as (port, heard):
        server = server_at(port)
        assert post(server) == {"a": "é"}
        assert ask(server, lambda server: server.ask("GET", "/v1/about?all=1")) == {
            "a": "é"
        }
    assert server.name == f"rollout_url=http://***@127.0.0.1:{port}/v1/"
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/do HTTP/1.1\r\n")
    assert b"Authorization: Basic bWU6c2VAY3JldA==" in head
    assert json.loads(body) == {"b": 2}
    assert heard[1].startswith(b"GET /v1/about?all=1 HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        response(b"", "Location: http://u:secret@elsewhere/v1/do", status="307 Moved"),
        response(b"no\nsuch\x1b[1m", status="404 Not Found"),
        response(b'{"a": 1'),
    ],
)
def test_an_answer_that_is_wrong_is_one_line_at_once(answer):
    with serving(answer) as (port, _), pytest.raises(UserError) as refused:
        post(server_at(port))
    (problem,) = refused.value.problems
    assert problem.startswith(f"rollout_url=http://***@127.0.0.1:{port}/v1/: /v1/do ")
    assert "secret" not in problem
    assert problem.isprintable()


@pytest.mark.parametrize(
    "answer",
    [
        response(b"busy", status="503 Service Unavailable"),
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
    ],
)
def test_what_may_pass_is_tried_again_where_it_may_be_asked_twice(answer):
    with serving(answer, answer, response()) as (port, heard):
        assert post(server_at(port)) == {"a": 1}
        assert len(heard) == 3
    with serving(answer) as (port, heard), pytest.raises(UserError, match="1 attempt "):
        post(server_at(port), attempts=1)
    assert len(heard) == 1


def test_an_answer_that_comes_letter_by_letter_is_given_up():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n"
    started = time.monotonic()
    with serving(drip(head)) as (port, _), pytest.raises(UserError, match="1 attempt "):
        post(server_at(port, timeout_seconds=0.4))
    assert time.monotonic() - started < 60  # the server never stops sending


PROMPT, STOP = [5, 40, 7], 3
ASKED = Asked(
    PROMPT,
    4,
    Sampling(),
    seed=1,
    stop_token_ids=[STOP, 47],
    vocab_size=48,
    weights="b-2",
)


READERS = {
    "vllm": read_vllm_completion,
    "sglang": read_generation,
}
COMPLETIONS = read_table("rl/completions.yml")


@pytest.mark.parametrize(
    "row",
    COMPLETIONS,
    ids=lambda row: f"{row['kind']} {row.get('wrong', row.get('tokens'))}",
)
def test_a_completion_is_taken_as_it_is_where_it_can_be_right(row):
    if "wrong" in row:
        with pytest.raises(ValueError):
            READERS[row["kind"]](row["answer"], ASKED)
    else:
        expected = (row["tokens"], [-0.5] * len(row["tokens"]), row["ended"])
        assert READERS[row["kind"]](row["answer"], ASKED) == expected
