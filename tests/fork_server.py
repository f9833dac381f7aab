"""Forks Python processes that have jax and the library imported already, which takes a process seconds by itself.

`tests/fork_client.py` stands for `python`: it hands over its arguments, environment, working directory and standard
streams, passes signals on, and ends as the process ends that was forked for it. No device has been looked for and no
thread started before the fork: what follows is a process of its own in all but the time of its imports.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from pathlib import Path

# What train, train_rl, generate, evaluate and the rest import; not the commands themselves, which are run.
IMPORTED = (
    "maxtext_lite.training.loop",
    "maxtext_lite.training.saving",
    "maxtext_lite.post_training.rollout_steps",
    "maxtext_lite.hf",
    "maxtext_lite.inference.sampler",
)


def become(request: dict, streams: list[int]) -> None:
    """Does what `python` does with these arguments; raises what ends it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    _take(request["environment"])
    kind, *words = request["arguments"]
    names = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        name, *sys.argv[1:] = words
        sys.argv[0], sys.path[0] = "-m", str(Path.cwd())
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        sys.path[0] = ""
        exec(compile(words[0], "<string>", "exec"), vars(names))
    else:
        sys.argv[:], sys.path[0] = [kind, *words], str(Path(kind).absolute().parent)
        runpy.run_path(kind, run_name="__main__")


def _take(environment: dict[str, str]) -> None:
    """Takes the environment over; jax has read its own variables, those of words alone are told to it again."""
    import jax

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    for name in {name for name in {*before, *environment} if name.startswith("JAX_")}:
        known = name.lower() in jax.config.values
        if known and before.get(name) != environment.get(name):
            assert name in environment, f"{name} cannot be taken back"
            jax.config.update(
                name.lower(),
                type(jax.config.values[name.lower()] or "")(environment[name]),
            )
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.path.insert(0, "")  # for what `python` itself puts first


def attend(connection: socket.socket) -> None:
    """Forks what is asked for; tells it of signals, and whoever asked of its end. It does not outlive who asked."""
    text, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        connection.close()
        become(json.loads(text), streams)
        return
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            connection.sendall(b"%d\n" % status)
            os._exit(0)
        told = connection.recv(1)
        os.kill(child, told[0] if told else signal.SIGKILL)
        if not told:
            os._exit(0)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return  # whoever started this has ended
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(connection)
            return
        connection.close()


if __name__ == "__main__":
    main()
