# SPDX-License-Identifier: Apache-2.0
"""Caffe2's messages, by our own schema (`proto/caffe2/caffe2.proto`). Asked for by `files`, and by tests that write nets."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from headrace.core.schemas import Schema


@cache
def caffe2_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.backends.netdef") / "_generated" / "caffe2.binpb").read_bytes())


def caffe2_message(name: str) -> Any:
    """A message class: "NetDef", "OperatorDef", "Argument"."""
    return caffe2_schema().message(f"caffe2.{name}")
