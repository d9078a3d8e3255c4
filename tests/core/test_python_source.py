# SPDX-License-Identifier: Apache-2.0
"""Python source is parsed in several threads at once."""

from __future__ import annotations

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.core.python_source import parse_python

SOURCE = "class Model:\n" + "".join(
    f"    def f{n}(self):\n        return [x for x in range({n})]\n" for n in range(300)
)


def test_several_threads_parse_at_the_same_time() -> None:
    def switch_threads(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    # A garbage collection in the middle of `ast.parse` runs Python code, and so another thread may go on.
    thresholds = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(500)
    try:
        with ThreadPoolExecutor(4) as threads:
            trees = list(threads.map(parse_python, [SOURCE] * 16))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(switch_threads)
    assert {len(tree.body) for tree in trees} == {1}


def test_an_expression_and_a_mistake() -> None:
    assert isinstance(parse_python("1 + x", "eval").body, ast.BinOp)
    with pytest.raises(SyntaxError):
        parse_python("def")
