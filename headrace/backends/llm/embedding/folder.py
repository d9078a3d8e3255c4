# SPDX-License-Identifier: Apache-2.0
"""What a folder says about the way from tokens to a vector, as sentence-transformers writes it.

Called by `embedding.model`. Reads JSON files only, and every path in them stays inside the folder. A folder without
`modules.json` is a model of transformers alone.

    modules.json                          which steps there are, in order: Transformer, Pooling, Dense, Normalize
    sentence_bert_config.json             max_seq_length, do_lower_case
    1_Pooling/config.json                 how vectors of tokens become one
    2_Dense/config.json                   sizes and activation of a layer behind it
    config_sentence_transformers.json     texts to put before an input
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.backends.llm.embedding.settings import POOLINGS, EmbeddingSettings
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented

MODULES = "modules.json"
_MOST_BYTES = 16 << 20

_FLAGS = {
    # In the order in which sentence-transformers joins them.
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}
_NOT_EMBEDDING = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForImageClassification",
    "ForObjectDetection",
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer behind the pooling."""

    folder: Path
    size: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """All steps."""

    transformer: Path
    """The folder of the model itself."""
    poolings: tuple[str, ...]
    """Several are joined end to end. Empty: it is up to the kind of model."""
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    lower_case: bool = False
    prompt: str = ""


def embeds(folder: Path, task: str = "") -> bool:
    """Whether a folder holds a model for embedding; `task` is the parameter of that name, and goes first."""
    if task not in ("", "embed", "generate"):
        raise InvalidArgument(f"parameter task is '{task[:32]}': use embed or generate, or leave it out")
    if task:
        return task == "embed"
    if (folder / MODULES).is_file():
        return True
    path = folder / "config.json"
    architectures = _read(path).get("architectures") if path.is_file() else None
    if not isinstance(architectures, list) or not architectures:
        return False
    return not str(architectures[0]).endswith(_NOT_EMBEDDING)


def recipe_of(folder: Path, settings: EmbeddingSettings) -> Recipe:
    """Read the steps; what the settings say goes first."""
    chosen = (settings.pooling,) if settings.pooling else ()
    if not (folder / MODULES).is_file():
        normalize = True if settings.normalize is None else settings.normalize
        return Recipe(folder, chosen, normalize=normalize, prompt=_prompt(folder, settings.prompt_name))
    transformer, normalize = folder, False
    poolings: tuple[str, ...] = ()
    dense: list[Dense] = []
    for position, module in enumerate(_modules(folder)):
        kind, place = str(module.get("type", "")).rpartition(".")[2], _inside(folder, module.get("path"))
        if (position == 0) is not (kind == "Transformer"):
            raise Unimplemented(_unknown(folder, kind))
        if kind == "Transformer":
            transformer = place
        elif kind == "Pooling":
            poolings = _poolings(place)
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalize = True
        else:
            raise Unimplemented(_unknown(folder, kind))
    own = transformer / "sentence_bert_config.json"
    told = _read(own) if own.is_file() else {}
    longest = told.get("max_seq_length")
    return Recipe(
        transformer,
        chosen or poolings,
        tuple(dense),
        normalize if settings.normalize is None else settings.normalize,
        longest if isinstance(longest, int) and longest > 0 else None,
        told.get("do_lower_case") is True,
        _prompt(folder, settings.prompt_name),
    )


def _unknown(folder: Path, kind: str) -> str:
    return (
        f"'{folder.name}/{MODULES}' has a step '{kind[:64]}' that this server does not know: it serves a Transformer, then "
        "Pooling, Dense and Normalize"
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _parsed(folder / MODULES)
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise FailedPrecondition(f"'{folder.name}/{MODULES}' is not a list of steps: save the model again")
    return modules


def _poolings(folder: Path) -> tuple[str, ...]:
    told = _read(folder / "config.json")
    named = told.get("pooling_mode")
    if named is None:
        modes = tuple(mode for flag, mode in _FLAGS.items() if told.get(flag) is True)
    else:
        modes = tuple(map(str, named)) if isinstance(named, list) else (str(named),)
    for mode in modes:
        if mode not in POOLINGS:
            raise Unimplemented(
                f"'{folder.name}/config.json' asks for pooling '{mode[:64]}': this server does {', '.join(POOLINGS)}. "
                "Choose one with parameter pooling"
            )
    return modes


def _dense(folder: Path) -> Dense:
    told = _read(folder / "config.json")
    activation = str(told.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    size = told.get("out_features")
    if activation not in _ACTIVATIONS or not isinstance(size, int) or not 0 < size < 1 << 20:
        raise Unimplemented(
            f"'{folder.name}/config.json' describes a layer this server does not do: it needs out_features, and an "
            f"activation_function of {', '.join(_ACTIVATIONS)}"
        )
    return Dense(folder, size, told.get("bias") is not False, _ACTIVATIONS[activation])


def _prompt(folder: Path, name: str) -> str:
    path = folder / "config_sentence_transformers.json"
    told = _read(path) if path.is_file() else {}
    prompts = told.get("prompts")
    known = prompts if isinstance(prompts, dict) else {}
    if name and name not in known:
        raise InvalidArgument(
            f"parameter prompt_name is '{name[:64]}', and the model knows {', '.join(map(str, known)) or 'no prompts'}: use "
            "one of these, or leave it out"
        )
    return str(known.get(name or told.get("default_prompt_name"), ""))


def _inside(folder: Path, path: object) -> Path:
    relative = PurePosixPath(path) if isinstance(path, str) else PurePosixPath("..")
    if relative.is_absolute() or ".." in relative.parts:
        raise FailedPrecondition(f"'{folder.name}/{MODULES}' names a path outside its folder: save the model again")
    return folder / relative


def _read(path: Path) -> dict[str, Any]:
    told = _parsed(path)
    if not isinstance(told, dict):
        raise FailedPrecondition(f"'{path.parent.name}/{path.name}' is not a JSON object: save the model again")
    return told


def _parsed(path: Path) -> Any:
    shown = f"'{path.parent.name}/{path.name}'"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FailedPrecondition(f"{shown} is larger than any such file: save the model again")
        return json.loads(path.read_bytes())
    except OSError:
        raise FailedPrecondition(f"{shown} is missing or cannot be read: copy the whole model folder") from None
    except (ValueError, RecursionError):
        raise FailedPrecondition(f"{shown} is not JSON: copy or save the model again") from None
