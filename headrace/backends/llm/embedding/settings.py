# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says about embedding.

Called by `embedding.model`. Must not look into the model's folder.

    parameters
      pooling            mean, cls, max or lasttoken: how one vector is made of those of the tokens. Unless told, what the
                         folder says (`1_Pooling/config.json`), else lasttoken for causal models and mean for others
      normalize          true: vectors of length 1. Unless told, what the folder says, else true
      truncate           true: a text longer than the model can read is cut; false (default): it is refused
      max_model_len      the most tokens of a text, where the model could read more
      prompt_name        which of the texts in `config_sentence_transformers.json` is put before each input
      dtype              auto (float32 on the CPU, what the folder says on a GPU), float32, bfloat16 or float16
      threads            of PyTorch, on the CPU; 0 (default) for as many as PyTorch chose
      trust_remote_code  true: run Python code that lies in the model's folder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.backends.parameters import number_of
from headrace.core.errors import InvalidArgument

POOLINGS = ("mean", "cls", "max", "lasttoken")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """All of them, read and checked. None: as the folder says."""

    pooling: str | None = None
    normalize: bool | None = None
    truncate: bool = False
    max_model_len: int | None = None
    prompt_name: str = ""
    dtype: str = "auto"
    threads: int = 0
    trust_remote_code: bool = False


def settings_of(parameters: Mapping[str, str]) -> EmbeddingSettings:
    """Read the parameters of a configuration."""
    return EmbeddingSettings(
        pooling=_choice(parameters, "pooling", POOLINGS),
        normalize=_switch(parameters, "normalize"),
        truncate=_switch(parameters, "truncate") or False,
        max_model_len=number_of(parameters, "max_model_len", 0, 1 << 22) or None,
        prompt_name=parameters.get("prompt_name", ""),
        dtype=_choice(parameters, "dtype", _DTYPES) or "auto",
        threads=number_of(parameters, "threads", 0, 1024),
        trust_remote_code=_switch(parameters, "trust_remote_code") or False,
    )


def _choice(parameters: Mapping[str, str], key: str, allowed: tuple[str, ...]) -> str | None:
    text = parameters.get(key)
    if text is None or text in allowed:
        return text
    raise InvalidArgument(f"parameter {key} is '{text[:32]}': use one of {', '.join(allowed)}")


def _switch(parameters: Mapping[str, str], key: str) -> bool | None:
    text = parameters.get(key)
    if text is None:
        return None
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use true or false")
    return text.lower() in ("true", "1")
