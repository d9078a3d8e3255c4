# SPDX-License-Identifier: Apache-2.0
"""The block that `headrace serve` prints on a terminal when all models were tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from terminals import CTRL_C, Terminal

from headrace.cli.serve import start_block
from headrace.programs.serve.settings import StartReport

URL = "http://127.0.0.1:8000"


def test_the_block_has_addresses_and_models() -> None:
    report = StartReport(
        URL, "127.0.0.1:8001", "http://127.0.0.1:8002/metrics", f"{URL}/console", f"{URL}/docs", ("a", "b"), {}
    )
    first, *rows = start_block(report).splitlines()
    assert first.endswith("serves 2 models. Ctrl-C stops it.")
    assert rows == [
        "  HTTP     http://127.0.0.1:8000",
        "  gRPC     127.0.0.1:8001",
        "  metrics  http://127.0.0.1:8002/metrics",
        "  console  http://127.0.0.1:8000/console",
        "  API      http://127.0.0.1:8000/docs",
        "  models   a, b",
    ]


def test_failed_models_are_named_and_many_are_counted() -> None:
    names = tuple(f"m{number}" for number in range(10))
    block = start_block(StartReport(URL, "", "", "", "", names, {"broken": "no file\nin it"}))
    assert "  models   m0, m1, m2, m3, m4, m5, m6, m7 and 2 more" in block and "gRPC" not in block
    assert block.splitlines()[-1].startswith("  failed   broken: no file")
    assert "  models   none" in start_block(StartReport(URL, "", "", "", "", (), {}))


@pytest.mark.slow
def test_a_terminal_shows_it_and_ctrl_c_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(
        "import numpy as np\n\ndef predict(x: np.ndarray) -> np.ndarray:\n    return 2 * x\n"
    )
    with Terminal(
        "serve", "double.py", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", cwd=tmp_path
    ) as terminal:
        terminal.read_until("serves 1 model. Ctrl-C stops it.")
        assert "models   double" in terminal.read_until("double")
        terminal.type(CTRL_C)
        assert terminal.process.wait(30) == 0
