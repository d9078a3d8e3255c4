# SPDX-License-Identifier: Apache-2.0
"""Parse Python source from any thread."""

from __future__ import annotations

import ast
from threading import Lock
from typing import Literal, overload

_LOCK = Lock()


@overload
def parse_python(source: str | bytes) -> ast.Module: ...


@overload
def parse_python(source: str | bytes, mode: Literal["eval"]) -> ast.Expression: ...


def parse_python(source: str | bytes, mode: str = "exec") -> ast.AST:
    """Return the syntax tree of a source, as `ast.parse` does, one thread at a time.

    Before Python 3.11.5, `ast.parse` in two threads at once may fail with "SystemError: AST constructor recursion depth
    mismatch" (https://github.com/python/cpython/issues/106905), and models are loaded in several threads.
    """
    with _LOCK:
        return ast.parse(source, mode=mode)
