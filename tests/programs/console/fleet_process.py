# SPDX-License-Identifier: Apache-2.0
"""`headrace up` with its console, in a process of its own, and stub services on it.

with fleet_up(folder, free_port()) as site:
    site.apply(site.model, runtime(), service("birds"))
    requests to site.url, with site.key
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from console_tab import aside
from local_site import LocalSite

from headrace.fleet.local.api_client import LocalFleet
from support.programs import HEADRACE
from support.waiting import eventually

PAGE = re.compile(r"(http://127\.0\.0\.1:\d+)/console#key=(\S+)")
T = TypeVar("T")


class FleetUp(LocalSite):
    """See the module. `url` and `key` are those that it printed."""

    url = key = ""

    def up(self) -> None:
        reported = self.root.parent / "told"
        arguments = [HEADRACE, "up", "--state-dir", self.root, "--port", str(self._port), "--console", "127.0.0.1:0"]
        with reported.open("wb") as output:
            self.process = subprocess.Popen(arguments, stdout=output, stderr=self._log)
        result = eventually(lambda: PAGE.search(reported.read_text()))
        self.url, self.key = result.groups()

    def ask(self, work: Callable[[LocalFleet], Awaitable[T]]) -> T:
        request = super().ask
        return aside(lambda: request(work))


@contextmanager
def fleet_up(folder: Path, port: int) -> Iterator[FleetUp]:
    """Nothing of it is left at the end."""
    site = FleetUp(folder, port)
    site.up()
    try:
        yield site
    finally:
        site.close()
