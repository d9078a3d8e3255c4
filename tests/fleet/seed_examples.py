# SPDX-License-Identifier: Apache-2.0
"""The examples of the specification, to the letter: in files, as some have spaces at the ends of their lines."""

from __future__ import annotations

from pathlib import Path


def _text(name: str) -> str:
    return (Path(__file__).parent / "seed" / f"{name}.yaml").read_text()


FIRST = _text("first")
ENGINE = _text("engine")
DECODER = _text("decoder")
ROUTER = _text("router")
RAW = _text("raw")
SERVERLESS = _text("serverless")
MULTI_NODE = _text("multi-node")
PAIRS = _text("pairs")
STATUS = _text("status")
