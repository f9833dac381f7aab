"""scripts/audit.py against a stand-in of OSV: what it asks, what it prints, and that nothing it meets fails."""

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator

import pytest

from tests.source_tree import REPOSITORY

_SPEC = importlib.util.spec_from_file_location("audit", REPOSITORY / "scripts" / "audit.py")
module = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(module)
LOCK = """# The lock
absl-py==2.3.1
jax==0.10.2 ; python_full_version < '3.12'
jax==0.11.2 ; python_full_version >= '3.12'
"""


@pytest.fixture
def database() -> Iterator[tuple[str, list[bytes], list[dict]]]:
    """Its address, what it answers next, and what it was asked."""
    answers, asked = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers, asked
        server.shutdown()
        thread.join()


def test_each_locked_version_is_asked_for_and_what_is_known_is_printed(database):
    url, answers, asked = database
    answers.append(b'{"results": [{}, {"vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]}, {}]}')
    assert module.audit(LOCK, url) == ["jax 0.10.2: PYSEC-1, GHSA-2"]
    assert [(query["package"]["name"], query["version"]) for query in asked[0]["queries"]] == [
        ("absl-py", "2.3.1"),
        ("jax", "0.10.2"),
        ("jax", "0.11.2"),
    ]
    answers.append(b'{"results": [{}, {}, {}]}')
    assert module.audit(LOCK, url) == ["no known vulnerability in 3 locked versions"]


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b'{"results": [{}]}', b'{"results": null}'])
def test_without_an_answer_it_says_that_nothing_was_audited(database, answer: bytes):
    url, answers, _ = database
    answers.append(answer)
    (line,) = module.audit(LOCK, url)
    assert line.startswith(f"dependencies not audited: {url} cannot be reached (")


def test_the_check_runs_it_and_does_not_fail_by_it():
    check = (REPOSITORY / "scripts" / "check.sh").read_text(encoding="utf-8")
    assert '"$venv_python" scripts/audit.py || true\n' in check
