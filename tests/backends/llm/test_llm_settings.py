# SPDX-License-Identifier: Apache-2.0
"""The sizes of an engine: what fits the machine, unless they are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.backends.llm.settings import EngineSizes, LlmSettings

GIB = 2**30
EIGHT_BILLION: Any = {"context": 8192, "page_bytes": 16 * 128 * 1024, "token_bytes": 2 * (8 * 4096 + 3 * 14336)}
"""The shape of an 8B Llama in bfloat16: 128 KiB of keys and values a token."""


@pytest.mark.parametrize(
    ("free_gib", "running", "step_tokens"),
    [(124, 256, 8192), (60, 256, 8192), (24, 128, 8192), (8, 64, 2048), (2, 64, 2048)],
)
def test_sizes_fit_the_memory_of_a_gpu(free_gib: int, running: int, step_tokens: int) -> None:
    sizes = LlmSettings(Path()).engine_sizes(**EIGHT_BILLION, free=free_gib * GIB)
    assert (sizes.max_running, sizes.max_step_tokens) == (running, step_tokens)
    assert sizes.pages == int(free_gib * GIB * 0.8) // EIGHT_BILLION["page_bytes"]


def test_a_small_model_does_not_take_a_whole_gpu() -> None:
    sizes = LlmSettings(Path()).engine_sizes(context=512, page_bytes=4096, token_bytes=1024, free=100 * GIB)
    assert sizes == EngineSizes(256, 8192, 4 * 256 * 512 // 16)


def test_a_cpu_has_its_own_sizes() -> None:
    sizes = LlmSettings(Path()).engine_sizes(**EIGHT_BILLION, free=None)
    assert sizes == EngineSizes(32, 512, 256)
    small = LlmSettings(Path()).engine_sizes(context=64, page_bytes=4096, token_bytes=1024, free=None)
    assert small.pages == 32 * 4, "no more than running sequences can use"


def test_configured_values_are_used() -> None:
    settings = LlmSettings(Path(), max_running=7, max_step_tokens=99, kv_cache_bytes=GIB)
    for free in (None, 124 * GIB):
        assert settings.engine_sizes(**EIGHT_BILLION, free=free) == EngineSizes(7, 99, 512)
