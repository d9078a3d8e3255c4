# SPDX-License-Identifier: Apache-2.0
"""The connections of one HTTP client: made, kept for the next request, and what is known when they break.

Used by `http` from any thread. A connection is in the hands of one request at a time; whatever goes wrong there, a
cancelled task or Ctrl-C too, closes it, so that no request reads the answer to another.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from headrace.client.addresses import Address
from headrace.client.failures import broken
from headrace.client.http1 import Answer, Cut, Head, NotHttp
from headrace.client.lines import Line, Lines
from headrace.client.retrying import Deadline, Failed, Fate
from headrace.client.transport import Options
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.tensors import Buffer

_IDLE_SECONDS = 50.0
"""Servers close what is idle for a minute or two; better we do, than that a request meets a closing one."""
_MOST_IDLE = 64
_LAST_WORDS_SECONDS = 1.0


class Connections:
    """Idle connections, the newest last."""

    def __init__(self, address: Address, lines: Lines, options: Options) -> None:
        self._address = address
        self._lines = lines
        self._tls = tls_context(options) if address.secure else None
        self._idle: list[tuple[Line, float]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    async def begin(self, buffers: Sequence[Buffer], deadline: Deadline) -> tuple[Line, Answer, Head]:
        """Send a request and read the head of its answer."""
        line = self._take() or await self._connect(deadline)
        try:
            try:
                await line.send(buffers, deadline)
            except OSError as error:
                return await self._last_words(line, error)
            answer = Answer(line, deadline)
            return line, answer, await answer.head()
        except BaseException as error:
            line.close()
            self._tell(error)
            raise

    async def finish(self, line: Line, answer: Answer, head: Head) -> Buffer:
        """Read the body; the connection goes back, or is closed."""
        try:
            body = await answer.body()
        except BaseException as error:
            line.close()
            self._tell(error)
            raise
        self.give(line, answer, head)
        return body

    async def piece(self, line: Line, answer: Answer) -> bytes:
        """Read a piece of the body."""
        try:
            return await answer.piece()
        except BaseException as error:
            line.close()
            self._tell(error)
            raise

    def give(self, line: Line, answer: Answer, head: Head) -> None:
        """The answer has been read: keep the connection if both sides may."""
        dropped = [line]
        with self._lock:
            if head.keeps and answer.leaves_clean and not self._closed:
                self._idle.append((line, time.monotonic()))
                dropped = [each for each, _ in self._idle[:-_MOST_IDLE]]
                del self._idle[:-_MOST_IDLE]
        for each in dropped:
            each.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line, _ in idle:
            line.close()

    def no_http(self, what: str) -> HeadraceError:
        """What is there does not speak the protocol."""
        other = "is it a gRPC port? Then use grpc://" if not self._address.secure else "is it an inference server?"
        if not self._address.secure:
            other += ", or does it speak TLS? Then use https://"
        return broken(self._address, f"{what}: {other}")

    def _take(self) -> Line | None:
        old: list[Line] = []
        found: Line | None = None
        with self._lock:
            if self._closed:
                raise FailedPrecondition("this client is closed: make a new one")
            if self._process != os.getpid():
                # After a fork, parent and child would read each other's answers.
                old = [line for line, _ in self._idle]
                self._idle, self._process = [], os.getpid()
            oldest = time.monotonic() - _IDLE_SECONDS
            while self._idle and found is None:
                line, since = self._idle.pop()
                if since < oldest or line.is_stale():
                    old.append(line)
                else:
                    found = line
        for line in old:
            line.close()
        return found

    async def _connect(self, deadline: Deadline) -> Line:
        try:
            return await self._lines.connect(self._address, self._tls, deadline)
        except OSError as error:
            final = isinstance(error, ssl.SSLError) or (
                isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            )
            fate = Fate.FINAL if final else Fate.UNSENT
            raise Failed(broken(self._address, error, connecting=True), fate) from None

    async def _last_words(self, line: Line, error: OSError) -> tuple[Line, Answer, Head]:
        """A server that does not want a body answers and closes while it is sent: that answer says why."""
        answer = Answer(line, Deadline(_LAST_WORDS_SECONDS, ""))
        try:
            head = await answer.head()
        except (OSError, Cut, NotHttp, HeadraceError):
            raise Failed(broken(self._address, error, unsent=True), Fate.UNSENT) from None
        return line, answer, Head(head.status, head.fields, keeps=False)

    def _tell(self, error: BaseException) -> None:
        """Raise what a broken connection means to the request; anything else is raised by the caller as it is."""
        if isinstance(error, NotHttp):
            raise self.no_http(str(error)) from None
        if isinstance(error, Cut):
            lost = ConnectionResetError("the server closed it")
            raise Failed(broken(self._address, lost), Fate.LOST) from None
        if isinstance(error, OSError):
            raise Failed(broken(self._address, error), Fate.LOST) from None


def tls_context(options: Options) -> ssl.SSLContext:
    """The context for a client's options."""
    if isinstance(options.verify, ssl.SSLContext):
        return options.verify
    try:
        context = ssl.create_default_context(cafile=options.verify if isinstance(options.verify, str) else None)
        if options.verify is False:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if options.cert is not None:
            files = (options.cert,) if isinstance(options.cert, str) else options.cert
            context.load_cert_chain(*files)
    except OSError as error:
        files_given = f"verify={options.verify!r}, cert={options.cert!r}"
        raise InvalidArgument(f"the TLS files cannot be used ({files_given}): {error}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
