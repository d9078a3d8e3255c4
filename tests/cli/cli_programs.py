# SPDX-License-Identifier: Apache-2.0
"""The `headrace` program as tests run it: a server over a folder, and commands that end by themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADRACE = Path(sys.executable).parent / "headrace"
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
PLAIN = os.environ | {"NO_COLOR": "1", "TERM": "dumb"}

CONFIG = """backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { }
"""
BROKEN = CONFIG.replace("dims: [ 4 ] }\noutput", "dimms: [ 4 ] }\noutput")
"""On line 3."""


def make_models(folder: Path, **configs: str) -> Path:
    """A repository with one version of each model."""
    for name, config in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run([HEADRACE, *arguments], env=PLAIN, capture_output=True, text=True, timeout=120, check=False)


class Server:
    """A running `headrace serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{LISTENING.findall(self.log)[0]}"

    def wait_for(self, text: str) -> None:
        """Return when the log has a text; the test's own time-out is the limit."""
        while text not in self.log:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)


@contextmanager
def serve(log: Path, *arguments: str | Path) -> Iterator[Server]:
    """Start a server on free ports, wait until it has tried its models, and end it well."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [HEADRACE, "serve", *arguments, "--http-port", "0", "--grpc-port", "0"],
            env=PLAIN,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, log)
    try:
        server.wait_for("model(s)")
        yield server
    finally:
        process.terminate()
        code = process.wait(100)
    assert code == 0, server.log
