"""The roll call of a run's processes, taken before jax starts, so that an error can name those that are missing.

jax's coordination service answers nobody until all processes have registered, and aborts them if they do not. So
process 0 first listens at the coordinator's address itself. The others connect, say their numbers, and are told once a
beat who is missing. When nobody is, it hangs up, and jax gets the port.
"""

import contextlib
import socket
import time
from collections.abc import Generator, Sequence

BEAT_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
_LONGEST_NUMBER = 16  # bytes
_MOST_NAMED = 8


class NotAllCame(Exception):
    """Processes that have not connected in time; says which."""


class RollCall:
    """Which processes of a run have connected, as far as this one knows.

    Attributes:
      missing: `processes 2 and 3 of 4 have not connected`; "": all have; None: process 0 has not answered.
    """

    def __init__(self, process: int, num_processes: int):
        self._process, self._num_processes = process, num_processes
        self.missing: str | None = None

    def take(self, address: str, bind_address: str, seconds: float) -> None:
        """Returns once all processes have connected.

        Args:
          address: host:port of process 0.
          bind_address: host:port at which process 0 listens.
          seconds: until process 0 ends the roll call for all that have connected, or one that it does not answer ends.
        Raises:
          NotAllCame: some have not.
          OSError: this is process 0, and it cannot listen there.
        """
        if self._process == 0:
            with contextlib.ExitStack() as connections, _listening(*_split(bind_address)) as server:
                self._call(server, connections, seconds)
            return
        deadline = time.monotonic() + seconds
        while not self._reported(_split(address)):
            if time.monotonic() > deadline:
                raise NotAllCame(f"process 0 of {self._num_processes} has not answered after {seconds:g} seconds")
            time.sleep(BEAT_SECONDS)
        until = time.monotonic() + _ANSWER_SECONDS
        while not _listens(_split(address)) and time.monotonic() < until:  # jax would try again after a second
            time.sleep(BEAT_SECONDS / 5)

    def _call(self, server: socket.socket, connections: contextlib.ExitStack, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        here: dict[int, socket.socket] = {}
        expected = range(1, self._num_processes)
        while self.missing != "":
            for connection in _waiting(server):
                connections.enter_context(connection)
                with contextlib.suppress(OSError, ValueError):  # no process of this run
                    here[int(connection.recv(_LONGEST_NUMBER))] = connection
                if here.keys() >= set(expected):
                    break
            self.missing = self._clause([number for number in expected if number not in here])
            over = f"{self.missing} after {seconds:g} seconds" if time.monotonic() > deadline else ""
            for number, connection in list(here.items()):
                try:
                    connection.sendall(f"{self.missing};{over}\n".encode())
                except OSError:  # it has died; the next of its number will connect
                    del here[number]
            if over and self.missing:
                raise NotAllCame(over)

    def _reported(self, address: tuple[str, int]) -> bool:
        """Whether all have connected when process 0 hangs up."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, _ANSWER_SECONDS) as connection,
            connection.makefile("r", encoding="utf-8") as lines,
        ):
            connection.sendall(f"{self._process}\n".encode())
            for line in lines:
                self.missing, _, over = line.rstrip("\n").partition(";")
                if self.missing and over:
                    raise NotAllCame(over)
        return self.missing == ""

    def _clause(self, missing: Sequence[int]) -> str:
        names, more = [str(each) for each in missing[:_MOST_NAMED]], len(missing) - _MOST_NAMED
        if more > 0:
            names.append(f"{more} more")
        if len(names) > 1:
            return f"processes {', '.join(names[:-1])} and {names[-1]} of {self._num_processes} have not connected"
        return "".join(f"process {name} of {self._num_processes} has not connected" for name in names)


def _listening(host: str, port: int) -> socket.socket:
    if host in ("", "::"):  # all addresses
        both = socket.has_dualstack_ipv6()
        family, host = socket.AF_INET6 if both else socket.AF_INET, ""
    else:
        both, family = False, socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)
    server.settimeout(BEAT_SECONDS)
    return server


def _waiting(server: socket.socket) -> Generator[socket.socket]:
    """Connections, until none comes for a beat."""
    with contextlib.suppress(TimeoutError):
        while True:
            connection, _ = server.accept()
            connection.settimeout(_ANSWER_SECONDS)
            yield connection


def _listens(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, _ANSWER_SECONDS):
        return True
    return False


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
