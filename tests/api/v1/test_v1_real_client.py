# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own client of 1.11, where there is one: TENSORRTSERVER_PYTHON says how to run a Python that has it.

It is from 2020, and its library for x86-64 alone, so it has an environment of its own; `real_client` says which.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from support.serving import Serving

COMMAND = shlex.split(os.environ.get("TENSORRTSERVER_PYTHON", ""))


@pytest.mark.platform
@pytest.mark.timeout(900)
@pytest.mark.skipif(not COMMAND, reason="TENSORRTSERVER_PYTHON does not say where tensorrtserver 1.11.0 is")
def test_the_real_client(server: Serving) -> None:
    script = Path(__file__).with_name("real_client.py")
    done = subprocess.run(
        [*COMMAND, str(script), f"127.0.0.1:{server.port}"], capture_output=True, text=True, timeout=880, check=False
    )
    assert done.stdout.rstrip().endswith("all is well"), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0
