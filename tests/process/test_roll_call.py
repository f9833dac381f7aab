"""The roll call by real sockets: who is missing, as every process sees it, and strangers at the port."""

import socket
import threading
import time

from maxtext_lite.process.roll_call import RollCall


def test_each_knows_who_is_missing_until_all_have_come():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rolls = [RollCall(process, 4) for process in range(4)]
    where = f"localhost:{port}", f"[::]:{port}", 60
    calls = [
        threading.Thread(target=roll.take, args=where, daemon=True) for roll in rolls
    ]

    def wait_until(start, *processes):
        deadline = time.monotonic() + 60
        while not all(
            (said := rolls[process].missing) is not None and said[:15] == start
            for process in processes
        ):
            assert time.monotonic() < deadline, [roll.missing for roll in rolls]
            time.sleep(0.01)

    calls[2].start()
    time.sleep(0.2)
    assert rolls[2].missing is None  # process 0 does not answer yet
    calls[0].start()
    wait_until("processes 1 and", 0, 2)
    with (
        socket.create_connection(("127.0.0.1", port)) as stranger,
        socket.create_connection(("127.0.0.1", port)) as one,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        one.sendall(b"1\n")
        wait_until("process 3 of 4 ", 0, 2)
    wait_until("processes 1 and", 0, 2)  # it has died
    calls[1].start()
    wait_until("process 3 of 4 ", 0, 1, 2)
    calls[3].start()
    wait_until("", 0, 1, 2, 3)
    for call in calls:
        call.join(60)
        assert not call.is_alive()
