# SPDX-License-Identifier: Apache-2.0
"""The lightest replica there is: Python without its site packages and one thread. For measuring what waking costs.

Answers everything with when it began to listen, by the clock that all processes of a machine share.
"""

import socket
import sys
import time

port = int(next(argument for argument in sys.argv if argument.startswith("--port=")).partition("=")[2])
load = next((argument for argument in sys.argv if argument.startswith("--load=")), "--load=0").partition("=")[2]
time.sleep(float(load))
door = socket.create_server(("127.0.0.1", port), backlog=256)
told = f"{time.monotonic():.6f}".encode()
answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(told), told)
while True:
    caller, _ = door.accept()
    with caller:
        asked = b""
        while b"\r\n\r\n" not in asked and (piece := caller.recv(65536)):
            asked += piece
        if asked:
            caller.sendall(answer)
            caller.shutdown(socket.SHUT_WR)
            caller.recv(1)
