# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend `llm`: the parameters of a model configuration, parsed and validated. Knows no torch.

model_path          the Hugging Face folder, relative to the version's folder or absolute; default: the version's folder
max_model_len       maximum tokens of prompt and completion; default: the model's limit, or what the KV cache holds
page_size           tokens per page of the KV cache; 16
kv_cache_bytes      size of the KV cache; or
kv_cache_share      ... this fraction of the GPU's free memory; 0.8. On a CPU, 512 MiB unless kv_cache_bytes is set
kv_cache_dtype      fp8: half the bytes of bfloat16 for each token, and less exact; default: auto, the dtype of the model
max_running         maximum running sequences; 256 on a GPU, 128 or 64 if the KV cache is small; 32 on a CPU
max_queue           maximum waiting requests, more are refused; 1024
scheduling_policy   fcfs: in the order of arrival; priority: by the requests' priority first
max_step_tokens     maximum tokens per step, longer prompts are computed in chunks; 8192 on a GPU, 4096 or 2048 if its memory
                    is small; 512 on a CPU
prefix_cache        true: reuse the KV cache of common prompt prefixes
kv_host_bytes       host memory for pages that are evicted from the KV cache; 0: they are computed again
kv_host_min_tokens  load what is at least so many tokens; less is computed again; 256
kv_disk_path        folder where pages of the host memory are also kept, path as in model_path; default: none
kv_disk_bytes       size of that folder; 16 GiB
kv_events           address to publish what the prefix cache holds, such as tcp://*:5557; default: not published
kv_events_replay    address for subscribers that have missed some, such as tcp://*:5558; default: none
kv_events_topic     topic of the published messages; default: empty
dtype               auto, float32, bfloat16 or float16
quantization        fp8: make the weights of linear layers FP8 when they are loaded, with a scale for each output; default:
                    weights are computed as the folder has them, quantised or not
speculation         ngram: draft tokens that followed the last ones before; draft: with the model in draft_model
speculation_tokens  maximum tokens of a draft; 7, or 4 with a draft model
draft_model         a smaller model with the same vocabulary, path as in model_path
prompt_lookup_min, prompt_lookup_max
                    tokens in a row that ngram looks for; 2 and 4
max_weight_bytes    on a CPU, refuse larger weights; default: what memory is free
trust_remote_code   false; true runs Python code of the model's folder
adapters            LoRA adapters: "name=path,name=path", paths as in model_path; loaded with the model
adapters_folder     folder of LoRA adapters, each a subfolder, loaded when a request names them; path as in model_path
adapters_hub        Hub repositories that requests may name as adapters: "organisation/name,organisation/*"; default: none
max_adapters        adapters on demand in device memory, and in one step; 4, or none without one of these three parameters
max_host_adapters   adapters on demand in host memory; 32, and at least max_adapters
max_lora_rank       largest rank of an adapter on demand; 16
chat_template       a template file that replaces the model's own, path as in model_path
default_max_tokens  maximum tokens of a completion whose request sets none; default: as many as fit
deterministic       true: a greedy or seeded request gets the same tokens whatever other requests run; slower; false
deterministic_rows  rows of a step that are computed together then, always so many; 128 on a GPU, 8 on a CPU
compile, cuda_graphs
how steps are computed on a GPU; true, if possible
threads             CPU threads per operator; default: all cores
tensor_parallel     number of processes (ranks) that share the model, each on a GPU of its own or all on the CPU; 1
rank_timeout_seconds
                    how long all ranks may take to load the model; 600
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.backends.contract import ModelFiles
from headrace.backends.model_config import parse_bool, parse_choice, parse_int
from headrace.core.errors import InvalidArgument
from headrace.models import adapters
from headrace.models.config.types import ModelConfig

_CPU_CACHE_BYTES = 512 * 2**20
_CPU_RUNNING, _CPU_STEP_TOKENS = 32, 512
_DISK_BYTES = 16 * 2**30
_GPU_RUNNING, _GPU_STEP_TOKENS = (256, 128, 64), (8192, 4096, 2048)
"""Largest first: the first that fits is the default, else the last."""
_CPU_DRAFT_ROWS, _GPU_DRAFT_ROWS = 16, 64
"""With more rows a step takes longer for each row, instead of waiting for the weights: drafts no longer pay."""
_CPU_FIXED_ROWS, _GPU_FIXED_ROWS = 8, 128
"""More rows make prompts faster, fewer rows a single stream: a GPU reads all weights for each block of rows."""
_SEQUENCE_TOKENS = 1024
"""The KV cache should hold this many tokens for each running sequence, or they would be preempted often."""
_STEP_SHARE = 0.05
"""The intermediate results of a step should take at most this fraction of the GPU's free memory."""
_PREFIX_FACTOR = 4
"""The KV cache holds at most this many times what running sequences can use; the rest is for prefixes."""
SCHEDULING_POLICIES = ("fcfs", "priority")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("fp8",)
KV_CACHE_DTYPES = ("auto", "fp8")
SPECULATIONS = ("ngram", "draft")
_ADAPTERS, _HOST_ADAPTERS, _LORA_RANK = 4, 32, 16
_ON_DEMAND = (adapters.FOLDER, adapters.HUB, "max_adapters")
_NGRAM_TOKENS, _DRAFT_MODEL_TOKENS = 7, 4
"""Seven tokens and the sampled one are a step of eight rows, for which a CUDA graph is captured."""
WEIGHT_SCHEME = "weight_scheme"
"""The parameter in which the backend says how the weights are quantised."""
_OTHER_PARAMETERS = frozenset(
    {
        WEIGHT_SCHEME,
        "task",
        "tool_format",
        "reasoning_format",
        "pooling",
        "normalize",
        "truncate",
        "prompt_name",
        "total_pixels",
        "max_media",
        "residency",
    }
)
"""Parameters that `embedding`, `vision`, the protocols and the repository read, or that the backend sets."""


MAX_RANKS = 64
"""Largest `tensor_parallel`."""


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """The settings of a model. None or 0: depends on the model or the device."""

    model_path: Path
    max_model_len: int | None = None
    page_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_share: float = 0.8
    kv_cache_dtype: str = "auto"
    max_running: int | None = None
    max_queue: int = 1024
    scheduling_policy: str = "fcfs"
    max_step_tokens: int | None = None
    prefix_cache: bool = True
    kv_host_bytes: int = 0
    kv_host_min_tokens: int = 256
    kv_disk_path: Path | None = None
    kv_disk_bytes: int = _DISK_BYTES
    kv_events: str = ""
    kv_events_replay: str = ""
    kv_events_topic: str = ""
    dtype: str = "auto"
    quantization: str | None = None
    speculation: str | None = None
    speculation_tokens: int = _NGRAM_TOKENS
    draft_model: Path | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    max_weight_bytes: int | None = None
    trust_remote_code: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapters_folder: Path | None = None
    adapters_hub: tuple[str, ...] = ()
    max_adapters: int = 0
    """0: no adapters on demand."""
    max_host_adapters: int = 0
    max_lora_rank: int = 0
    chat_template: str | None = None
    """The text of the template."""
    default_max_tokens: int | None = None
    deterministic: bool = False
    deterministic_rows: int | None = None
    compile: bool = True
    cuda_graphs: bool = True
    threads: int = 0
    tensor_parallel: int = 1
    rank_timeout_seconds: int = 600

    @property
    def takes_adapters(self) -> bool:
        """Whether the model has adapters, or loads them on demand."""
        return bool(self.adapters or self.max_adapters)

    def cache_bytes(self, free: int | None) -> int:
        """Return the size of the KV cache; `free` is the GPU's free memory, None on a CPU."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        return _CPU_CACHE_BYTES if free is None else int(free * self.kv_cache_share)

    def engine_sizes(self, context: int, page_bytes: int, token_bytes: int, free: int | None) -> EngineSizes:
        """Return what fits the machine.

        `context`: the longest sequence. `token_bytes`: intermediate results per token of a step. `free`: the GPU's free
        memory, None on a CPU.
        """
        pages = self.cache_bytes(free) // page_bytes
        running, step_tokens, factor, draft_rows = _CPU_RUNNING, _CPU_STEP_TOKENS, 1, _CPU_DRAFT_ROWS
        if free is not None:
            tokens = min(context, _SEQUENCE_TOKENS)
            running = _first(_GPU_RUNNING, lambda count: count * tokens <= pages * self.page_size)
            step_tokens = _first(_GPU_STEP_TOKENS, lambda count: count * token_bytes <= free * _STEP_SHARE)
            factor, draft_rows = _PREFIX_FACTOR, _GPU_DRAFT_ROWS
        running, step_tokens = self.max_running or running, self.max_step_tokens or step_tokens
        most = factor * running * -(-context // self.page_size)
        fixed_rows = self.deterministic_rows or (_CPU_FIXED_ROWS if free is None else _GPU_FIXED_ROWS)
        return EngineSizes(
            running,
            step_tokens,
            min(pages, most),
            draft_rows if self.speculation else 0,
            fixed_rows if self.deterministic else 0,
        )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What an engine can do at a time: set, or chosen for the machine and the model."""

    max_running: int
    max_step_tokens: int
    pages: int
    """Pages of the KV cache."""
    draft_rows: int = 0
    """Rows of a step up to which drafted tokens are added to it; 0 without speculation."""
    fixed_rows: int = 0
    """Rows that are computed together, for answers that do not depend on other requests; 0: as many as there are."""


def model_folder(config: ModelConfig, files: ModelFiles) -> Path:
    """Return the folder of the model, which may not exist."""
    return _path(files, config.parameters.get("model_path", "."))


def read_settings(config: ModelConfig, files: ModelFiles) -> LlmSettings:
    """Read and validate the parameters of a model configuration."""
    parameters = config.parameters
    known = set(LlmSettings.__dataclass_fields__) | _OTHER_PARAMETERS
    for name in parameters:
        if name not in known:
            raise InvalidArgument(
                f"parameter {name[:64]} of model '{config.name}' is not known: use one of {', '.join(sorted(known))}"
            )
    template = parameters.get("chat_template")
    speculation = parse_choice(parameters, "speculation", None, SPECULATIONS)
    _check_speculation(parameters, speculation)
    _check_offload(parameters)
    _check_deterministic(parameters)
    lookup_max = parse_int(parameters, "prompt_lookup_max", 4, 64, 1)
    return LlmSettings(
        model_path=model_folder(config, files),
        max_model_len=parse_int(parameters, "max_model_len", None, 2**24, 2),
        page_size=parse_int(parameters, "page_size", 16, 1024, 1),
        kv_cache_bytes=parse_int(parameters, "kv_cache_bytes", None, 2**50, 1),
        kv_cache_share=_parse_fraction(parameters, "kv_cache_share", 0.8),
        kv_cache_dtype=parse_choice(parameters, "kv_cache_dtype", "auto", KV_CACHE_DTYPES),
        max_running=parse_int(parameters, "max_running", None, 4096, 1),
        max_queue=parse_int(parameters, "max_queue", 1024, 1_000_000),
        scheduling_policy=parse_choice(parameters, "scheduling_policy", "fcfs", SCHEDULING_POLICIES),
        max_step_tokens=parse_int(parameters, "max_step_tokens", None, 2**20, 1),
        prefix_cache=parse_bool(parameters, "prefix_cache", True),
        kv_host_bytes=parse_int(parameters, "kv_host_bytes", 0, 2**50),
        kv_host_min_tokens=parse_int(parameters, "kv_host_min_tokens", 256, 2**24, 1),
        kv_disk_path=_path(files, parameters["kv_disk_path"]) if parameters.get("kv_disk_path") else None,
        kv_disk_bytes=parse_int(parameters, "kv_disk_bytes", _DISK_BYTES, 2**50, 1),
        kv_events=_parse_address(parameters, "kv_events"),
        kv_events_replay=_parse_address(parameters, "kv_events_replay"),
        kv_events_topic=parameters.get("kv_events_topic", ""),
        dtype=parse_choice(parameters, "dtype", "auto", DTYPES),
        quantization=parse_choice(parameters, "quantization", None, QUANTIZATIONS),
        speculation=speculation,
        speculation_tokens=parse_int(
            parameters, "speculation_tokens", _DRAFT_MODEL_TOKENS if speculation == "draft" else _NGRAM_TOKENS, 63, 1
        ),
        draft_model=_path(files, parameters["draft_model"]) if speculation == "draft" else None,
        prompt_lookup_min=parse_int(parameters, "prompt_lookup_min", min(2, lookup_max), lookup_max, 1),
        prompt_lookup_max=lookup_max,
        max_weight_bytes=parse_int(parameters, "max_weight_bytes", None, 2**50),
        trust_remote_code=parse_bool(parameters, "trust_remote_code", False),
        adapters=_parse_adapters(files, parameters.get("adapters", "")),
        **_parse_on_demand(parameters, files),
        chat_template=None if template is None else _read_text(_path(files, template), "chat_template"),
        default_max_tokens=parse_int(parameters, "default_max_tokens", None, 2**24, 1),
        deterministic=parse_bool(parameters, "deterministic", False),
        deterministic_rows=parse_int(parameters, "deterministic_rows", None, 8192, 1),
        compile=parse_bool(parameters, "compile", True),
        cuda_graphs=parse_bool(parameters, "cuda_graphs", True),
        threads=parse_int(parameters, "threads", 0, 1024),
        tensor_parallel=parse_int(parameters, "tensor_parallel", 1, MAX_RANKS, 1),
        rank_timeout_seconds=parse_int(parameters, "rank_timeout_seconds", 600, 86400, 1),
    )


def _check_speculation(parameters: Mapping[str, str], speculation: str | None) -> None:
    """Refuse parameters of speculative decoding that would be ignored, and a draft model that is not named."""
    if speculation and parameters.get("tensor_parallel", "1").strip() != "1":
        raise InvalidArgument("parameter speculation does not work with tensor_parallel yet: leave out one of them")
    if speculation == "draft" and not parameters.get("draft_model"):
        raise InvalidArgument("parameter speculation is 'draft': name the folder of the draft model in draft_model")
    users = {
        "speculation_tokens": SPECULATIONS,
        "draft_model": ("draft",),
        "prompt_lookup_min": ("ngram",),
        "prompt_lookup_max": ("ngram",),
    }
    for name, methods in users.items():
        if name in parameters and speculation not in methods:
            raise InvalidArgument(
                f"parameter {name} needs parameter speculation: set it to {' or '.join(methods)}, or leave out {name}"
            )


def _check_offload(parameters: Mapping[str, str]) -> None:
    """Refuse KV offload where it would be ignored or wrong."""
    if parse_int(parameters, "kv_host_bytes", 0, 2**50):
        if parameters.get("tensor_parallel", "1").strip() != "1":
            raise InvalidArgument(
                "parameter kv_host_bytes does not work with tensor_parallel yet: leave out one of them"
            )
        if not parse_bool(parameters, "prefix_cache", True):
            raise InvalidArgument(
                "parameter kv_host_bytes needs the prefix cache: leave out prefix_cache, or kv_host_bytes"
            )
    else:
        for name in ("kv_host_min_tokens", "kv_disk_path"):
            if name in parameters:
                raise InvalidArgument(f"parameter {name} needs kv_host_bytes: set it, or leave out {name}")
    if "kv_disk_bytes" in parameters and not parameters.get("kv_disk_path"):
        raise InvalidArgument("parameter kv_disk_bytes needs kv_disk_path: name a folder, or leave out kv_disk_bytes")


def _check_deterministic(parameters: Mapping[str, str]) -> None:
    """Refuse what would make answers depend on other requests, and a parameter that would be ignored."""
    if not parse_bool(parameters, "deterministic", False):
        if "deterministic_rows" in parameters:
            raise InvalidArgument("parameter deterministic_rows needs deterministic: set it to true, or leave it out")
        return
    if parameters.get("tensor_parallel", "1").strip() != "1":
        raise InvalidArgument("parameter deterministic does not work with tensor_parallel yet: leave out one of them")
    for name in ("adapters", *_ON_DEMAND):
        if parameters.get(name, "").strip():
            raise InvalidArgument(f"parameter deterministic does not work with {name} yet: leave out one of them")


def _first(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    return next((size for size in sizes if fits(size)), sizes[-1])


def _path(files: ModelFiles, text: str) -> Path:
    return (files.version_folder / text).absolute()


def _parse_address(parameters: Mapping[str, str], name: str) -> str:
    text = parameters.get(name, "")
    if text and not text.startswith(("tcp://", "ipc://")):
        raise InvalidArgument(f"parameter {name} is '{text[:64]}': use an address such as tcp://127.0.0.1:5557")
    return text


def _parse_fraction(parameters: Mapping[str, str], name: str, default: float) -> float:
    text = parameters.get(name)
    if text is None:
        return default
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgument(f"parameter {name} is '{text[:32]}': use a number above 0 and at most 1")
    return share


def _parse_adapters(files: ModelFiles, text: str) -> Mapping[str, Path]:
    named: dict[str, Path] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = entry.partition("=")
        if not (name.strip() and equals and path.strip()) or name.strip() in named:
            raise InvalidArgument(
                f"parameter adapters has '{entry[:64]}': use name=path, each name once, with commas between"
            )
        named[name.strip()] = _path(files, path.strip())
    return named


def _parse_on_demand(parameters: Mapping[str, str], files: ModelFiles) -> dict[str, Any]:
    """Return the settings of adapters on demand, which one of three parameters switches on."""
    used = [name for name in _ON_DEMAND if parameters.get(name, "").strip()]
    if not used:
        for name in ("max_host_adapters", "max_lora_rank"):
            if name in parameters:
                raise InvalidArgument(
                    f"parameter {name} is for adapters on demand: set {adapters.FOLDER}, or leave it out"
                )
        return {}
    if parameters.get("tensor_parallel", "1").strip() != "1":
        raise InvalidArgument(
            f"parameter {used[0]} does not work with tensor_parallel yet: name the adapters in parameter adapters, which "
            "are loaded with the model, or leave out one of the two"
        )
    places = adapters.adapter_places(parameters, files.version_folder)
    most = parse_int(parameters, "max_adapters", _ADAPTERS, 256, 1)
    in_host = parse_int(parameters, "max_host_adapters", max(_HOST_ADAPTERS, most), 100_000, 1)
    if in_host < most:
        raise InvalidArgument(
            f"parameter max_host_adapters is {in_host}, less than max_adapters, {most}: adapters in device memory are in "
            f"host memory, too; set it to {most} or more"
        )
    return {
        "adapters_folder": places.folder,
        "adapters_hub": places.hub,
        "max_adapters": most,
        "max_host_adapters": in_host,
        "max_lora_rank": parse_int(parameters, "max_lora_rank", _LORA_RANK, 512, 1),
    }


def _read_text(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > 2**20:
            raise InvalidArgument(f"parameter {name} names a file of more than 1 MiB: name a Jinja template")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"parameter {name} names a file that cannot be read: {path.name[:128]}") from None
