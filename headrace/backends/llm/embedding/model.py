# SPDX-License-Identifier: Apache-2.0
"""One version of an embedding model: a folder of transformers or sentence-transformers, opened on a device.

Called by the `llm` backend for folders of which `embedding.folder.embeds` says so. Weights come from safetensors alone, and
nothing is fetched. Instances of one device share the weights.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.backends.contract import Placement
from headrace.backends.llm.embedding.folder import Dense, Recipe, recipe_of
from headrace.backends.llm.embedding.instance import TOKEN_COUNT, EmbeddingInstance, Steps
from headrace.backends.llm.embedding.settings import EmbeddingSettings, settings_of
from headrace.backends.one_at_a_time import TRANSFORMERS
from headrace.backends.signature import Port, Signature, check_signature, completion
from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unimplemented
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

MAX_BATCH_SIZE = 32
_ENDLESS = 1 << 24
"""A tokenizer that does not know its limit says a number far beyond this."""
_MORE_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "longformer")
"""Families that count positions from behind their filling token, so that the last few are never used."""


def complete(config: ModelConfig, folder: Path) -> Any:
    """What the folder tells that the configuration leaves out. See `contract.Backend.complete`."""
    settings = settings_of(config.parameters)
    recipe = recipe_of(folder, settings)
    message = completion(config, _signature(_size(_hugging_config(recipe, settings), recipe)))
    if not config.max_batch_size and message.max_batch_size:
        message.max_batch_size = MAX_BATCH_SIZE
    return message


class EmbeddingModel:
    """See the module."""

    def __init__(self, config: ModelConfig, recipe: Recipe, settings: EmbeddingSettings, tokenizer: Any) -> None:
        self._name = config.name
        self._recipe = recipe
        self._settings = settings
        self._tokenizer = tokenizer
        self._config = _hugging_config(recipe, settings)
        self._size = _size(self._config, recipe)
        check_signature(config, _signature(self._size))
        if config.max_batch_size < 1:
            raise InvalidArgument(
                f"model '{config.name}' embeds batches of texts, and its configuration has max_batch_size: 0: set "
                f"{MAX_BATCH_SIZE}, or leave it out"
            )
        self._max_tokens = _max_tokens(self._config, tokenizer, recipe, settings)
        self._models: dict[Any, tuple[Any, tuple[tuple[Any, Any, str], ...]]] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, config: ModelConfig, folder: Path) -> EmbeddingModel:
        """Look into the folder and read the tokenizer. Weights are read when the first instance of a device opens."""
        settings = settings_of(config.parameters)
        recipe = recipe_of(folder, settings)
        if not any(recipe.transformer.glob("*.safetensors")):
            raise FailedPrecondition(
                f"'{recipe.transformer.name}' of model '{config.name}' has no *.safetensors: other formats of weights can "
                "run code when they are read. Convert the model with save_pretrained(..., safe_serialization=True)"
            )
        from transformers import AutoTokenizer

        tokenizer = _told(recipe, "tokenizer", AutoTokenizer.from_pretrained, settings)
        return cls(config, recipe, settings, tokenizer)

    def open(self, placement: Placement) -> EmbeddingInstance:
        """Read the weights, or take those that are there."""
        device = self._device(placement)
        with self._lock:
            if device not in self._models:
                self._models[device] = self._loaded(device)
            model, dense = self._models[device]
        recipe, settings = self._recipe, self._settings
        steps = Steps(
            tokenizer=self._tokenizer,
            model=model,
            poolings=recipe.poolings or (_usual_pooling(self._config),),
            dense=dense,
            normalize=recipe.normalize,
            max_tokens=self._max_tokens,
            truncate=settings.truncate,
            lower_case=recipe.lower_case,
            prompt=recipe.prompt,
            threads=settings.threads if device.type == "cpu" else 0,
            device=device,
            size=self._size,
        )
        return EmbeddingInstance(self._name, steps)

    def close(self) -> None:
        """Free the weights."""
        self._models.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _device(self, placement: Placement) -> Any:
        if placement.kind != "gpu":
            return torch.device("cpu")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if placement.device >= count:
            raise FailedPrecondition(
                f"model '{self._name}' asks for GPU {placement.device}, and PyTorch {torch.__version__} sees {count} here: "
                "install a PyTorch built for CUDA, check the driver, or say KIND_CPU in instance_group"
            )
        return torch.device("cuda", placement.device)

    def _loaded(self, device: Any) -> tuple[Any, tuple[tuple[Any, Any, str], ...]]:
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        chosen = self._settings.dtype
        dtype = ("float32" if device.type == "cpu" else "auto") if chosen == "auto" else chosen
        with TRANSFORMERS:
            model, report = _told(
                self._recipe,
                "weights",
                AutoModel.from_pretrained,
                self._settings,
                config=self._config,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
            )
        # Bert-like checkpoints often come without the head that makes `pooler_output`, which is not used here.
        missing = [key for key in report["missing_keys"] if not key.startswith("pooler.")]
        if missing:
            raise FailedPrecondition(
                f"the weights of model '{self._name}' lack {len(missing)} tensors of its architecture, such as "
                f"'{missing[0]}': copy the whole model folder"
            )
        return model.eval().to(device), tuple(_dense_weights(dense, device) for dense in self._recipe.dense)


def _hugging_config(recipe: Recipe, settings: EmbeddingSettings) -> Any:
    from transformers import AutoConfig

    config = _told(recipe, "config.json", AutoConfig.from_pretrained, settings)
    if getattr(config, "is_encoder_decoder", False):
        raise Unimplemented(
            f"'{recipe.transformer.name}' has an encoder and a decoder, and this server embeds with one"
        )
    config.use_cache = False
    return config


def _told(recipe: Recipe, what: str, function: Any, settings: EmbeddingSettings, **more: Any) -> Any:
    """What a function of transformers reads from the folder; its complaints go to the log."""
    try:
        return function(
            str(recipe.transformer), local_files_only=True, trust_remote_code=settings.trust_remote_code, **more
        )
    except HeadraceError:
        raise
    except Exception as error:
        log.exception("the %s in %s could not be read", what, recipe.transformer)
        hint = (
            "it needs Python code of its own: read that code, then set parameter trust_remote_code: true"
            if "trust_remote_code" in str(error)
            else "copy the whole model folder, and see the server's log"
        )
        raise FailedPrecondition(f"the {what} in '{recipe.transformer.name}' could not be read: {hint}") from None


def _size(config: Any, recipe: Recipe) -> int:
    if recipe.dense:
        return recipe.dense[-1].size
    size = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(size, int) or size < 1:
        raise Unimplemented(f"'{recipe.transformer.name}/config.json' does not tell hidden_size: it is no text model")
    return size * (len(recipe.poolings) or 1)


def _signature(size: int) -> Signature:
    given = Port(TEXT_INPUT, "text", BYTES, (-1, 1))
    vector = Port(EMBEDDING, "vector", FP32, (-1, size))
    count = Port(TOKEN_COUNT, "number", INT32, (-1, 1))
    return Signature({TEXT_INPUT: given}, {EMBEDDING: vector, TOKEN_COUNT: count}, {})


def _usual_pooling(config: Any) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(config)
    # Bert can be told to generate as well.
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return "lasttoken" if causal else "mean"


def _max_tokens(config: Any, tokenizer: Any, recipe: Recipe, settings: EmbeddingSettings) -> int:
    text = config.get_text_config()
    limits = [recipe.max_tokens or _ENDLESS, getattr(tokenizer, "model_max_length", _ENDLESS) or _ENDLESS]
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        skipped = (getattr(text, "pad_token_id", 1) or 0) + 1 if text.model_type in _MORE_POSITIONS else 0
        limits.append(positions - skipped)
    most = int(min(limits))
    wanted = settings.max_model_len
    if wanted is None:
        return most
    if wanted > most:
        raise InvalidArgument(
            f"parameter max_model_len is {wanted}, and the model reads at most {most} tokens: lower it"
        )
    return wanted


def _dense_weights(dense: Dense, device: Any) -> tuple[Any, Any, str]:
    path = dense.folder / "model.safetensors"
    try:
        tensors = load_file(path)
        weight = tensors["linear.weight"].float().to(device)
        bias = tensors["linear.bias"].float().to(device) if dense.bias else None
    except Exception:
        log.exception("%s could not be read", path)
        raise FailedPrecondition(
            f"'{dense.folder.name}/model.safetensors' could not be read as a layer: copy the whole model folder, and "
            "convert its pytorch_model.bin if that is all there is"
        ) from None
    if weight.shape[0] != dense.size:
        raise FailedPrecondition(
            f"'{dense.folder.name}' has weights for {weight.shape[0]} outputs, and says {dense.size}"
        )
    return weight, bias, dense.activation
