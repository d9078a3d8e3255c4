# SPDX-License-Identifier: Apache-2.0
"""What a configuration says to the backend `llm`: its parameters, read and checked. Called by `backend`. Knows no torch.

model_path          the Hugging Face folder, relative to the version's folder or absolute; the version's folder itself
max_model_len       tokens of a prompt and its answer together; the model's own limit, or what the cache has room for
page_size           tokens in a page of the cache; 16
kv_cache_bytes      memory for keys and values; or
kv_cache_share      ... so much of the GPU's free memory; 0.8. On a CPU, 512 MiB unless kv_cache_bytes says otherwise
max_running         sequences that are computed at once; 64 on a GPU, 32 on a CPU
max_queue           requests that may wait besides; those beyond are refused; 1024
max_step_tokens     tokens of one step; longer prompts are computed in chunks; 2048 on a GPU, 512 on a CPU
prefix_cache        true: what prompts have in common is computed once
dtype               auto, float32, bfloat16 or float16
trust_remote_code   false; true runs Python code of the model's folder
adapters            LoRA adapters: "name=path,name=path", paths as model_path
chat_template       a file with a template in place of the model's own, as model_path
default_max_tokens  tokens of an answer whose request does not say; as many as fit
compile, cuda_graphs
how steps are computed on a GPU; true, where it is possible
threads             of a CPU, for one operator; all cores
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.backends.contract import ModelFiles
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_CPU_CACHE_BYTES = 512 * 2**20
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_OF_OTHERS = frozenset(
    {"task", "tool_format", "pooling", "normalize", "truncate", "prompt_name", "total_pixels", "max_media"}
)
"""Read by `embedding`, by `seeing` and by the protocols."""


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """All of them. What is None or 0 depends on the model or the device."""

    model_path: Path
    max_model_len: int | None = None
    page_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_share: float = 0.8
    max_running: int | None = None
    max_queue: int = 1024
    max_step_tokens: int | None = None
    prefix_cache: bool = True
    dtype: str = "auto"
    trust_remote_code: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)
    chat_template: str | None = None
    """Its text."""
    default_max_tokens: int | None = None
    compile: bool = True
    cuda_graphs: bool = True
    threads: int = 0

    def cache_bytes(self, free: int | None) -> int:
        """For keys and values; `free` is what the GPU has left, None on a CPU."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        return _CPU_CACHE_BYTES if free is None else int(free * self.kv_cache_share)

    def running_on(self, device: str) -> int:
        """How many sequences at once."""
        return self.max_running or (64 if device == "cuda" else 32)

    def step_tokens_on(self, device: str) -> int:
        """How many tokens in a step."""
        return self.max_step_tokens or (2048 if device == "cuda" else 512)


def model_folder(config: ModelConfig, files: ModelFiles) -> Path:
    """Where the model is; it need not be there."""
    return _path(files, config.parameters.get("model_path", "."))


def read_settings(config: ModelConfig, files: ModelFiles) -> LlmSettings:
    """Read the parameters, refusing what nobody knows."""
    given = config.parameters
    known = set(LlmSettings.__dataclass_fields__) | _OF_OTHERS
    for name in given:
        if name not in known:
            raise InvalidArgument(
                f"parameter {name[:64]} of model '{config.name}' is not known: use one of {', '.join(sorted(known))}"
            )
    dtype = given.get("dtype", "auto")
    if dtype not in _DTYPES:
        raise InvalidArgument(f"parameter dtype is '{dtype[:32]}': use one of {', '.join(_DTYPES)}")
    template = given.get("chat_template")
    return LlmSettings(
        model_path=model_folder(config, files),
        max_model_len=_number(given, "max_model_len", 2, 2**24),
        page_size=_number(given, "page_size", 1, 1024) or 16,
        kv_cache_bytes=_number(given, "kv_cache_bytes", 1, 2**50),
        kv_cache_share=_share(given, "kv_cache_share", 0.8),
        max_running=_number(given, "max_running", 1, 4096),
        max_queue=_or(_number(given, "max_queue", 0, 1_000_000), 1024),
        max_step_tokens=_number(given, "max_step_tokens", 1, 2**20),
        prefix_cache=_switch(given, "prefix_cache", True),
        dtype=dtype,
        trust_remote_code=_switch(given, "trust_remote_code", False),
        adapters=_adapters(files, given.get("adapters", "")),
        chat_template=None if template is None else _text_of(_path(files, template), "chat_template"),
        default_max_tokens=_number(given, "default_max_tokens", 1, 2**24),
        compile=_switch(given, "compile", True),
        cuda_graphs=_switch(given, "cuda_graphs", True),
        threads=_number(given, "threads", 0, 1024) or 0,
    )


def _path(files: ModelFiles, text: str) -> Path:
    return (files.version_folder / text).absolute()


def _number(given: Mapping[str, str], name: str, lowest: int, highest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17 and lowest <= int(text) <= highest):
        raise InvalidArgument(f"parameter {name} is '{text[:32]}': use a whole number from {lowest} to {highest}")
    return int(text)


def _or(number: int | None, default: int) -> int:
    return default if number is None else number


def _share(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgument(f"parameter {name} is '{text[:32]}': use a number above 0 and at most 1")
    return share


def _switch(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"parameter {name} is '{text[:32]}': use true or false")
    return text.lower() in ("true", "1")


def _adapters(files: ModelFiles, text: str) -> Mapping[str, Path]:
    adapters: dict[str, Path] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = entry.partition("=")
        if not (name.strip() and equals and path.strip()) or name.strip() in adapters:
            raise InvalidArgument(
                f"parameter adapters has '{entry[:64]}': use name=path, each name once, with commas between"
            )
        adapters[name.strip()] = _path(files, path.strip())
    return adapters


def _text_of(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > 2**20:
            raise InvalidArgument(f"parameter {name} names a file of more than 1 MiB: name a Jinja template")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"parameter {name} names a file that cannot be read: {path.name[:128]}") from None
