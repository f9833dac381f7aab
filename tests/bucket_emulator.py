"""Buckets for tests: gcp-storage-emulator, which a program reaches by three environment variables.

The emulator ignores preconditions (ifGenerationMatch), which the lease and TensorStore's conditional writes rest on,
does not say which generation of an object it gives (x-goog-generation), which those writes name, nor when its
metadata changed, which renews a lease. It gives all of an object where its last bytes are asked for, which is how
ArrayRecord begins. Here it does none of that.
"""

import contextlib
import datetime
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus, server

from tests.source_tree import REPOSITORY

BUCKET = "bucket"
# Nobody is asked for credentials, nor for the kind of the bucket, which the emulator does not know.
_NO_CREDENTIALS = {
    "FSSPEC_GCS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    "NO_GCE_CHECK": "true",
}


def variables(port: int) -> dict[str, str]:
    """What a process needs in its environment; gcsfs, TensorStore and TensorFlow each have a variable of their own."""
    url = f"http://127.0.0.1:{port}"
    names = (
        "STORAGE_EMULATOR_HOST",
        "TENSORSTORE_GCS_HTTP_URL",
        "CLOUD_STORAGE_EMULATOR_ENDPOINT",
    )
    return dict.fromkeys(names, url) | _NO_CREDENTIALS


def _corrected(handler):
    """A handler of requests that does as a bucket does."""

    def corrected(request, response, storage, *args, **kwargs):
        query, params = request.query, request.params
        wanted = "upload_id" not in query and query.get("ifGenerationMatch")
        last_bytes = (request.get_header("range") or "").removeprefix("bytes=-")
        name = params.get("object_id") or query.get("name", [None])[0]
        if wanted:
            name = name or request.data["meta"]["name"]
        found = storage.objects.get(params.get("bucket_name"), {}).get(name)
        if wanted and wanted[0] != (found["generation"] if found else "0"):
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
        if found and request.method == "GET":
            response["x-goog-generation"] = found["generation"]
        if found and last_bytes.isdecimal():
            start = max(int(found["size"]) - int(last_bytes), 0)
            request._request_handler.headers.replace_header("range", f"bytes={start}-")
        if found and request.method == "PATCH":
            now = datetime.datetime.now(datetime.UTC)
            found["updated"] = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        handler(request, response, storage, *args, **kwargs)

    return corrected


def _serve() -> None:
    from gcp_storage_emulator import server as emulator

    for _, methods in emulator.HANDLERS:
        for method in methods:
            methods[method] = _corrected(methods[method])
    emulator.Storage._write_config_to_file = lambda self: (
        None
    )  # all objects' metadata, at each write
    server.HTTPServer.request_queue_size = 128
    with emulator.create_server(
        "127.0.0.1", 0, in_memory=True, default_bucket=BUCKET
    ) as running:
        while running._api._httpd is None:
            pass
        print(running._api._httpd.server_port, flush=True)
        sys.stdin.read()  # until the test ends, in whatever way


@contextlib.contextmanager
def bucket_server() -> Iterator[dict[str, str]]:
    """Serves an empty bucket; gives the `variables` that reach it, and in BUCKET_PROCESS the id of its process."""
    command = [sys.executable, "-m", "tests.bucket_emulator"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as it:
        assert it.stdin is not None
        assert it.stdout is not None
        yield variables(int(it.stdout.readline())) | {"BUCKET_PROCESS": str(it.pid)}
        it.stdin.close()


if __name__ == "__main__":
    _serve()
