# SPDX-License-Identifier: Apache-2.0
"""When the bytes of a request came to who decodes them, for its timeline; noted only while somebody watches requests.

Held by `shared`, switched by the console through a composition root. `V2Http` and `V2Grpc` exchange the function that
decodes for one that looks at the clock first; with nobody watching, the usual one is called and there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import ParamSpec

from headrace.core.messages import InferRequest

P = ParamSpec("P")
Switch = Callable[[bool], None]


class DecodeTimes:
    """Of the last request that was decoded: it is taken into a timeline, if at all, before the next one comes."""

    def __init__(self) -> None:
        self._switches: list[Switch] = []
        self._last: tuple[InferRequest, int] | None = None

    def follow(self, switch: Switch) -> None:
        """Have this called with whether to use `timed` from now on."""
        self._switches.append(switch)

    def switch(self, on: bool) -> None:
        """Begin or end."""
        for switch in self._switches:
            switch(on)
        self._last = None  # it holds the tensors of a request

    def timed(self, decode: Callable[P, InferRequest]) -> Callable[P, InferRequest]:
        """A function that decodes, and notes when it began."""

        def noting(*args: P.args, **kwargs: P.kwargs) -> InferRequest:
            received_ns = monotonic_ns()
            request = decode(*args, **kwargs)
            self._last = (request, received_ns)
            return request

        return noting

    def received_ns(self, request: InferRequest) -> int | None:
        """When this very request came; None if it is not the last one, or not of v2."""
        return self._last[1] if self._last is not None and self._last[0] is request else None
