# SPDX-License-Identifier: Apache-2.0
"""Progress bars on a terminal while models load, and log lines elsewhere."""

from __future__ import annotations

import io
import logging
import os
import pty
import select
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.progress import LoadingBars, LoadingLines, LogStream, logging_beside_bars
from headrace.core.clock import SystemClock
from headrace.core.telemetry.progress import ProgressEvent
from support.programs import HEADRACE
from support.tiny_models import CONFIG, make_models

SLOW = (
    CONFIG
    + 'parameters { key: "sleep_milliseconds" value { string_value: "400" } }\n'
    + 'model_warmup { name: "first" batch_size: 1\n'
    + '  inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }\n'
)


@pytest.fixture
def logs() -> Iterator[None]:
    """Logging as it was, afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = (list(root.handlers), root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]
    logging.captureWarnings(False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bars_on(stream: io.StringIO) -> LoadingBars:
    return LoadingBars(Console(file=stream, force_terminal=True, width=80, _environ={}))


def running(task: str, message: str = "", done: float = 0) -> ProgressEvent:
    return ProgressEvent(task, done, 2, message=message)


def test_bars_appear_and_disappear_with_their_tasks() -> None:
    stream = Terminal()
    bars = bars_on(stream)
    bars(running("load a", "reading the model"))
    bars(running("load b"))
    assert bars.visible and "reading the model" in stream.getvalue()
    bars(ProgressEvent("load a", state="finished"))
    assert bars.visible
    bars(ProgressEvent("load b", state="failed"))
    assert not bars.visible
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back
    bars(ProgressEvent("load c", state="finished"))  # never seen: nothing to paint
    assert not bars.visible


def test_bars_from_many_threads() -> None:
    bars = bars_on(Terminal())

    def load(name: str) -> None:
        for done in range(3):
            bars(running(name, f"step {done}", done))
        bars(ProgressEvent(name, state="finished"))

    threads = [threading.Thread(target=load, args=(f"load {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bars.visible


def test_log_lines_stay_whole_beside_bars() -> None:
    stream = Terminal()
    bars = bars_on(stream)
    beside = LogStream(bars, stream)
    beside.write("before\n")
    assert stream.getvalue() == "before\n"
    bars(running("load a"))
    line = "a line that is wider than the terminal " * 4
    beside.write(line + "\n")
    assert line + "\n" in stream.getvalue()
    bars.close()
    beside.write("after\n")
    assert stream.getvalue().endswith("after\n") and not bars.visible


def test_no_bars_without_a_terminal(logs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, kind, wanted in (
        (io.StringIO(), "auto", True),
        (Terminal(), "json", True),
        (Terminal(), "auto", False),
    ):
        with logging_beside_bars("info", kind, bars=wanted, stream=stream) as progress:  # type: ignore[arg-type]
            assert isinstance(progress, LoadingLines)
    with logging_beside_bars("info", "auto", bars=True, stream=Terminal()) as progress:
        assert isinstance(progress, LoadingBars)
        progress(running("load a"))
    assert not progress.visible


class Later(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_long_load_logs_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Later()
    lines = LoadingLines(clock)
    with caplog.at_level("INFO", "headrace.cli"):
        lines(running("load a", "reading the model"))
        clock.now = 4
        lines(running("load a", "reading the model"))
        assert not caplog.messages
        clock.now = 6
        lines(running("load a", "warming up", 1))
        lines(running("load b"))
        lines(ProgressEvent("load a", state="finished"))
    assert caplog.messages == ["load a: warming up (1 of 2)"]


def test_on_a_real_terminal(tmp_path: Path) -> None:
    models = make_models(tmp_path, slow=SLOW)
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [HEADRACE, "serve", models, "--http-port", "0", "--grpc-port", "0"],
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": "1"},
        stdin=inner,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    shown = b""
    try:
        while b"ready: 1 model(s): slow" not in shown and select.select([terminal], [], [], 100)[0]:
            shown += os.read(terminal, 65536)
    finally:
        process.terminate()
        code = process.wait(100)
        os.close(terminal)
    text = shown.decode()
    assert code == 0, text
    assert "load slow version 1" in text and "warming up: first" in text
    hidden, back = text.rindex("\x1b[?25l"), text.rindex("\x1b[?25h")
    assert hidden < back < text.index("ready: 1 model(s): slow")
