# SPDX-License-Identifier: Apache-2.0
"""Parse Python source from any thread."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal, overload

_LOCK = Lock()


@overload
def parse_python(source: str | bytes) -> ast.Module: ...


@overload
def parse_python(source: str | bytes, mode: Literal["eval"]) -> ast.Expression: ...


def parse_python(source: str | bytes, mode: str = "exec") -> ast.AST:
    """Return the syntax tree of a source, as `ast.parse` does, one thread at a time.

    Before Python 3.11.5, `ast.parse` within another one may fail with "SystemError: AST constructor recursion depth
    mismatch" (https://github.com/python/cpython/issues/106905): models are loaded in several threads, and a finalizer
    that the garbage collector calls may log a traceback, which is parsed.
    """
    with _LOCK, collection_paused():
        return ast.parse(source, mode=mode)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector from running."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
