# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command as the first process of a container, which SIGTERM does not end by itself."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from headrace.cli import main
os.getpid = lambda: {pid}
main.app = lambda: signal.raise_signal(signal.SIGTERM)
main.main()
"""


def test_sigterm_ends_it_while_it_still_imports() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT.format(pid=1)]).returncode == 143


def test_elsewhere_the_signal_is_left_to_the_kernel() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT.format(pid=2)]).returncode == -15
