"""`python` by a process of `tests/fork_server.py`, whose socket is the first argument. Imports next to nothing."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
    }
    text = (json.dumps(request) + "\n").encode()
    sent = socket.send_fds(server, [text], [0, 1, 2])
    server.sendall(text[sent:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    answer = server.recv(16)
code = os.waitstatus_to_exitcode(int(answer)) if answer else 1
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
