"""Pictures of a run's report and of TensorBoard for the docs, taken by a headless Chromium.

python -m maxtext_lite.report RUN_DIR && python scripts/make_screenshots.py RUN_DIR docs/images
It needs `chromium` (Debian: apt-get install chromium) and `pip install playwright tensorboard`.
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

MOST_BYTES = 200_000
START_SECONDS = 120
TAGS = "%5E%28loss%7Ceval_loss%7Cglobal_batch_to_train%7Clearning_rate%29$"  # those that the picture shows


def take(page: str, picture: Path, *, height: int, seconds: float) -> None:
    """A picture of a page, taken some time after it has loaded.

    Raises:
      SystemExit: there is no browser, or the picture is too large for the repository.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: neither chromium nor google-chrome is installed.")
    with sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        tab = opened.new_page(viewport={"width": 1280, "height": height})
        tab.goto(page, wait_until="load", timeout=120_000)
        tab.wait_for_timeout(1000 * seconds)
        tab.screenshot(path=picture)
        opened.close()
    if picture.stat().st_size > MOST_BYTES:
        sys.exit(f"error: {picture} has {picture.stat().st_size:,} bytes, more than {MOST_BYTES:,}. Lower the height.")
    print(f"{picture}: {picture.stat().st_size:,} bytes")


@contextlib.contextmanager
def tensorboard(directory: Path) -> Iterator[str]:
    """The address of a TensorBoard of a directory, on loopback, while the block runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", str(port)]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--load_fast=false"])
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(START_SECONDS):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{address}data/runs", timeout=5).close()
                break
            if server.poll() is not None:
                sys.exit("error: tensorboard ended. Is it installed here?")
            time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Takes both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("output", type=Path, help="directory of the pictures")
    arguments = parser.parse_args()
    report = arguments.run_directory / "report.html"
    if not report.is_file():
        sys.exit(f"error: {report} is not there. `python -m maxtext_lite.report {arguments.run_directory}` makes it.")
    arguments.output.mkdir(parents=True, exist_ok=True)
    take(report.resolve().as_uri(), arguments.output / "report.png", height=1200, seconds=2)
    with tensorboard(arguments.run_directory) as address:
        take(
            f"{address}?tagFilter={TAGS}#timeseries",
            arguments.output / "tensorboard.png",
            height=920,
            seconds=20,
        )


if __name__ == "__main__":
    main()
