# SPDX-License-Identifier: Apache-2.0
"""Configuration of an embedding model: the parameters of its model configuration, and the files of its folder.

parameters
pooling            mean, cls, max or lasttoken: how the token vectors become one. Default: the folder's
`1_Pooling/config.json`, else lasttoken for causal models and mean for others
normalize          true: vectors of length 1. Default: the folder's configuration, else true
truncate           true: truncate a text that is too long; false (default): refuse it
max_model_len      maximum tokens of a text, if lower than the model's limit
prompt_name        which prompt of `config_sentence_transformers.json` is put before each input
dtype              auto (float32 on a CPU, the folder's on a GPU), float32, bfloat16 or float16
max_weight_bytes   on a CPU, refuse larger weights; default: what memory is free
threads            PyTorch threads on a CPU; 0 (default): PyTorch's choice
trust_remote_code  true: run Python code of the model's folder

files, as sentence-transformers writes them
modules.json                         the modules in order: Transformer, Pooling, Dense, Normalize
sentence_bert_config.json            max_seq_length, do_lower_case
1_Pooling/config.json                how the token vectors become one
2_Dense/config.json                  size and activation of a linear layer
config_sentence_transformers.json    prompts to put before an input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.backends.llm.settings import DTYPES
from headrace.backends.model_config import parse_bool, parse_choice, parse_int, read_json, read_json_object
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented

TASKS = ("generate", "embed", "rank", "transcribe")
POOLINGS = ("mean", "cls", "max", "lasttoken")
MODULES = "modules.json"
_POOLING_FLAGS = {
    # In the order in which sentence-transformers concatenates them.
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}
_SPEECH = "WhisperForConditionalGeneration"
_CLASSIFIER = "ForSequenceClassification"
_NOT_EMBEDDING = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForImageClassification",
    "ForObjectDetection",
)


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The parameters of an embedding model. None: the folder's configuration decides."""

    pooling: str | None = None
    normalize: bool | None = None
    truncate: bool = False
    max_model_len: int | None = None
    prompt_name: str = ""
    dtype: str = "auto"
    max_weight_bytes: int | None = None
    threads: int = 0
    trust_remote_code: bool = False


def read_settings(parameters: Mapping[str, str]) -> EmbeddingSettings:
    """Read and validate the parameters of a model configuration."""
    if parameters.get("quantization"):
        raise InvalidArgument("parameter quantization is for generating models, and this one embeds: leave it out")
    return EmbeddingSettings(
        pooling=parse_choice(parameters, "pooling", None, POOLINGS),
        normalize=parse_bool(parameters, "normalize", None),
        truncate=parse_bool(parameters, "truncate", False),
        max_model_len=parse_int(parameters, "max_model_len", 0, 1 << 22) or None,
        prompt_name=parameters.get("prompt_name", ""),
        dtype=parse_choice(parameters, "dtype", "auto", DTYPES),
        max_weight_bytes=parse_int(parameters, "max_weight_bytes", None, 2**50),
        threads=parse_int(parameters, "threads", 0, 1024),
        trust_remote_code=parse_bool(parameters, "trust_remote_code", False),
    )


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling."""

    folder: Path
    size: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingPipeline:
    """The modules of a sentence-transformers folder; a folder without `modules.json` is a plain transformers model."""

    transformer: Path
    """The folder of the transformers model."""
    poolings: tuple[str, ...]
    """Several are concatenated. Empty: depends on the kind of model."""
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    lower_case: bool = False
    prompt: str = ""


def model_task(folder: Path, task: str = "") -> str:
    """Return what a folder's model does, one of `TASKS`. The parameter `task` overrides the folder's configuration."""
    if task not in ("", *TASKS):
        raise InvalidArgument(f"parameter task is '{task[:32]}': use {', '.join(TASKS)}, or leave it out")
    if task:
        return task
    path = folder / "config.json"
    config = _read_object(path) if path.is_file() else {}
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if architecture.endswith(_CLASSIFIER) and _label_count(config) == 1:
        return "rank"
    if architecture == _SPEECH:
        return "transcribe"
    if (folder / MODULES).is_file():
        return "embed"
    return "generate" if not architecture or architecture.endswith(_NOT_EMBEDDING) else "embed"


def _label_count(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2  # transformers' default, which it leaves out


def read_pipeline(folder: Path, settings: EmbeddingSettings) -> EmbeddingPipeline:
    """Read the modules of a folder. The settings override it. Paths in its files must stay inside the folder."""
    chosen = (settings.pooling,) if settings.pooling else ()
    if not (folder / MODULES).is_file():
        normalize = True if settings.normalize is None else settings.normalize
        return EmbeddingPipeline(folder, chosen, normalize=normalize, prompt=_read_prompt(folder, settings.prompt_name))
    transformer, normalize = folder, False
    poolings: tuple[str, ...] = ()
    dense: list[DenseLayer] = []
    for position, module in enumerate(_read_modules(folder)):
        kind, subfolder = str(module.get("type", "")).rpartition(".")[2], _subfolder(folder, module.get("path"))
        if (position == 0) is not (kind == "Transformer"):
            raise Unimplemented(_unknown_module(folder, kind))
        if kind == "Transformer":
            transformer = subfolder
        elif kind == "Pooling":
            poolings = _read_poolings(subfolder)
        elif kind == "Dense":
            dense.append(_read_dense(subfolder))
        elif kind == "Normalize":
            normalize = True
        else:
            raise Unimplemented(_unknown_module(folder, kind))
    path = transformer / "sentence_bert_config.json"
    config = _read_object(path) if path.is_file() else {}
    max_tokens = config.get("max_seq_length")
    return EmbeddingPipeline(
        transformer,
        chosen or poolings,
        tuple(dense),
        normalize if settings.normalize is None else settings.normalize,
        max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else None,
        config.get("do_lower_case") is True,
        _read_prompt(folder, settings.prompt_name),
    )


def _unknown_module(folder: Path, kind: str) -> str:
    return (
        f"'{folder.name}/{MODULES}' has a module '{kind[:64]}' that is not supported there: this server supports a "
        "Transformer, then Pooling, Dense and Normalize"
    )


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json(folder / MODULES, *_file_errors(folder / MODULES))
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise FailedPrecondition(f"'{folder.name}/{MODULES}' is not a list of modules: save the model again")
    return modules


def _read_poolings(folder: Path) -> tuple[str, ...]:
    config = _read_object(folder / "config.json")
    named = config.get("pooling_mode")
    if named is None:
        modes = tuple(mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag) is True)
    else:
        modes = tuple(map(str, named)) if isinstance(named, list) else (str(named),)
    for mode in modes:
        if mode not in POOLINGS:
            raise Unimplemented(
                f"'{folder.name}/config.json' asks for pooling '{mode[:64]}': this server supports {', '.join(POOLINGS)}. "
                "Choose one with parameter pooling"
            )
    return modes


def _read_dense(folder: Path) -> DenseLayer:
    config = _read_object(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    size = config.get("out_features")
    if activation not in _ACTIVATIONS or not isinstance(size, int) or not 0 < size < 1 << 20:
        raise Unimplemented(
            f"'{folder.name}/config.json' describes an unsupported layer: it needs out_features, and an "
            f"activation_function of {', '.join(_ACTIVATIONS)}"
        )
    return DenseLayer(folder, size, config.get("bias") is not False, _ACTIVATIONS[activation])


def _read_prompt(folder: Path, name: str) -> str:
    path = folder / "config_sentence_transformers.json"
    config = _read_object(path) if path.is_file() else {}
    prompts = config.get("prompts")
    known = prompts if isinstance(prompts, dict) else {}
    if name and name not in known:
        raise InvalidArgument(
            f"parameter prompt_name is '{name[:64]}', and the model knows {', '.join(map(str, known)) or 'no prompts'}: use "
            "one of these, or leave it out"
        )
    return str(known.get(name or config.get("default_prompt_name"), ""))


def _subfolder(folder: Path, path: object) -> Path:
    relative = PurePosixPath(path) if isinstance(path, str) else PurePosixPath("..")
    if relative.is_absolute() or ".." in relative.parts:
        raise FailedPrecondition(f"'{folder.name}/{MODULES}' names a path outside its folder: save the model again")
    return folder / relative


def read_transformer_config(folder: Path) -> Mapping[str, Any]:
    """Return the config.json of a transformers model."""
    return _read_object(folder / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, *_file_errors(path))


def _file_errors(path: Path) -> tuple[str, str]:
    """Return the file's name and the message if it is missing."""
    name = f"'{path.parent.name}/{path.name}'"
    return name, f"{name} is missing or cannot be read: copy the whole model folder"
