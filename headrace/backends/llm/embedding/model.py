# SPDX-License-Identifier: Apache-2.0
"""An embedding model on PyTorch: its weights, and instances that compute the vectors of batches of texts.

The `llm` backend uses it for folders of embedding models (`embedding.config.model_task`). Weights are read from
safetensors only, and nothing is downloaded. Texts are computed in groups of similar length, so that short ones are not
padded to the longest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from headrace.backends.contract import Array, Placement, SleepLevel
from headrace.backends.llm.embedding.config import (
    DenseLayer,
    EmbeddingPipeline,
    EmbeddingSettings,
    read_pipeline,
    read_settings,
    read_transformer_config,
)
from headrace.backends.llm.encoder import (
    DeviceWeights,
    check_batch_size,
    check_safetensors,
    complete_batched,
    computing,
    from_pretrained,
    load_encoder,
    set_threads,
)
from headrace.backends.llm.quantization.checkpoint import check_quantization
from headrace.backends.signature import Port, Signature, check_signature
from headrace.backends.torch_import import device_of
from headrace.backends.weight_files import check_sizes
from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    Unimplemented,
)
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

MAX_BATCH_SIZE = 32
_UNLIMITED = 1 << 24
"""A tokenizer without a limit reports a number far beyond this."""
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "longformer")
"""Model families that count positions from behind the padding token, so that the last few are never used."""
TOKEN_COUNT = "token_count"  # noqa: S105  # the name of an output
_MAX_GROUP_TOKENS = 16384
"""Tokens in one forward pass, padding included. More does not increase throughput, and takes memory."""
_SHORT_TOKENS = 64
"""Texts up to this length are grouped regardless of their lengths: each forward pass has a fixed cost."""
CHARACTERS_PER_TOKEN = 64
"""No tokenizer averages more over a text; a longer text is refused or truncated without tokenizing it."""
_ACTIVATIONS = {
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
}


def complete_config(config: ModelConfig, folder: Path) -> Any:
    """Add the tensors and the batch size to a configuration that leaves them out. For `contract.Backend.complete`."""
    settings = read_settings(config.parameters)
    pipeline = read_pipeline(folder, settings)
    check_sizes(pipeline.transformer, read_transformer_config(pipeline.transformer))
    signature = _signature(_vector_size(_read_hf_config(pipeline, settings), pipeline))
    return complete_batched(config, signature, MAX_BATCH_SIZE)


class EmbeddingModel:
    """One version of an embedding model. Instances on one device share the weights."""

    def __init__(
        self, config: ModelConfig, pipeline: EmbeddingPipeline, settings: EmbeddingSettings, tokenizer: Any
    ) -> None:
        self._name = config.name
        self._pipeline = pipeline
        self._settings = settings
        self._tokenizer = tokenizer
        transformer_config = read_transformer_config(pipeline.transformer)
        self._weights = check_sizes(pipeline.transformer, transformer_config)
        quantized = check_quantization(pipeline.transformer, transformer_config)
        if quantized is not None:
            raise FailedPrecondition(
                f"the weights of model '{config.name}' are quantised ({quantized.quantization}), which backend 'llm' "
                "computes for generating models only: choose a checkpoint that is not quantised"
            )
        self._config = _read_hf_config(pipeline, settings)
        self._size = _vector_size(self._config, pipeline)
        check_signature(config, _signature(self._size))
        check_batch_size(config, "embeds batches of texts", MAX_BATCH_SIZE)
        self._max_tokens = max_tokens(self._config, tokenizer, pipeline.max_tokens, settings)
        folders = [pipeline.transformer, *(dense.folder for dense in pipeline.dense)]
        self._models = DeviceWeights(config.name, folders, self._load_weights, _tensors)

    @classmethod
    def load(cls, config: ModelConfig, folder: Path) -> EmbeddingModel:
        """Read the folder's configuration and tokenizer. The first instance on a device loads the weights."""
        settings = read_settings(config.parameters)
        pipeline = read_pipeline(folder, settings)
        check_safetensors(config.name, pipeline.transformer)
        from transformers import AutoTokenizer

        tokenizer = from_pretrained(pipeline.transformer, "tokenizer", AutoTokenizer.from_pretrained, settings)
        return cls(config, pipeline, settings, tokenizer)

    def open(self, placement: Placement) -> EmbeddingInstance:
        """Return an instance; load the weights if it is the first on its device."""
        device = device_of(self._name, placement)
        model, dense = self._models.on(device)
        pipeline, settings = self._pipeline, self._settings
        loaded = LoadedPipeline(
            tokenizer=self._tokenizer,
            model=model,
            poolings=pipeline.poolings or (_default_pooling(self._config),),
            dense=dense,
            normalize=pipeline.normalize,
            max_tokens=self._max_tokens,
            truncate=settings.truncate,
            lower_case=pipeline.lower_case,
            prompt=pipeline.prompt,
            threads=settings.threads if device.type == "cpu" else 0,
            device=device,
            size=self._size,
        )
        return EmbeddingInstance(self._name, loaded, self._models)

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """See `contract.SleepableModel`."""
        return self._models.sleep(level)

    def wake(self) -> None:
        """See `contract.SleepableModel`."""
        self._models.wake()

    def close(self) -> None:
        """Free the weights."""
        self._models.clear()

    def _load_weights(self, device: Any) -> tuple[Any, tuple[tuple[Any, Any, str], ...]]:
        from transformers import AutoModel

        # BERT-like checkpoints often lack the head that computes `pooler_output`, which is not used here.
        model = load_encoder(
            self._name,
            self._pipeline.transformer,
            AutoModel,
            self._config,
            self._settings,
            device,
            weights=self._weights,
            unused="pooler.",
        )
        return model, tuple(_load_dense(dense, device) for dense in self._pipeline.dense)


def _tensors(weights: tuple[Any, tuple[tuple[Any, Any, str], ...]]) -> list[Any]:
    """Return the tensors of a model and of its dense layers."""
    model, dense = weights
    return [*model.parameters(), *(tensor for layer in dense for tensor in layer[:2] if tensor is not None)]


def _read_hf_config(pipeline: EmbeddingPipeline, settings: EmbeddingSettings) -> Any:
    from transformers import AutoConfig

    config = from_pretrained(pipeline.transformer, "config.json", AutoConfig.from_pretrained, settings)
    if getattr(config, "is_encoder_decoder", False):
        raise Unimplemented(
            f"'{pipeline.transformer.name}' has an encoder and a decoder, and this server embeds with one"
        )
    config.use_cache = False
    return config


def _vector_size(config: Any, pipeline: EmbeddingPipeline) -> int:
    if pipeline.dense:
        return pipeline.dense[-1].size
    size = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(size, int) or size < 1:
        raise Unimplemented(f"'{pipeline.transformer.name}/config.json' has no hidden_size: it is not a text model")
    return size * (len(pipeline.poolings) or 1)


def _signature(size: int) -> Signature:
    given = Port(TEXT_INPUT, "text", BYTES, (-1, 1))
    vector = Port(EMBEDDING, "vector", FP32, (-1, size))
    count = Port(TOKEN_COUNT, "number", INT32, (-1, 1))
    return Signature({TEXT_INPUT: given}, {EMBEDDING: vector, TOKEN_COUNT: count}, {})


def _default_pooling(config: Any) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(config)
    # BERT is in the causal mapping as well.
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return "lasttoken" if causal else "mean"


def max_tokens(config: Any, tokenizer: Any, folder_limit: int | None, settings: EmbeddingSettings) -> int:
    """Return how many tokens of a text the model reads."""
    text = config.get_text_config()
    limits = [folder_limit or _UNLIMITED, getattr(tokenizer, "model_max_length", _UNLIMITED) or _UNLIMITED]
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        skipped = (getattr(text, "pad_token_id", 1) or 0) + 1 if text.model_type in _OFFSET_POSITIONS else 0
        limits.append(positions - skipped)
    limit = int(min(limits))
    wanted = settings.max_model_len
    if wanted is None:
        return limit
    if wanted > limit:
        raise InvalidArgument(
            f"parameter max_model_len is {wanted}, and the model reads at most {limit} tokens: lower it"
        )
    return wanted


def _load_dense(dense: DenseLayer, device: Any) -> tuple[Any, Any, str]:
    path = dense.folder / "model.safetensors"
    try:
        tensors = load_file(path)
        weight = tensors["linear.weight"].float().to(device)
        bias = tensors["linear.bias"].float().to(device) if dense.bias else None
    except Exception:
        log.exception("%s could not be read.", path)
        raise FailedPrecondition(
            f"'{dense.folder.name}/model.safetensors' could not be read as a layer: copy the whole model folder, and "
            "convert its pytorch_model.bin if that is all there is"
        ) from None
    if weight.shape[0] != dense.size:
        raise FailedPrecondition(
            f"'{dense.folder.name}' has weights for {weight.shape[0]} outputs, but its config.json has {dense.size}"
        )
    return weight, bias, dense.activation


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline with loaded weights: from a text to its vector."""

    tokenizer: Any
    model: Any
    poolings: tuple[str, ...]
    dense: tuple[tuple[Any, Any, str], ...]
    """Weight, bias or None, activation."""
    normalize: bool
    max_tokens: int
    truncate: bool
    lower_case: bool
    prompt: str
    threads: int
    device: Any
    size: int
    """Size of a vector."""


class EmbeddingInstance:
    """Computes batches of texts. Implements `contract.ComputeInstance`."""

    def __init__(self, name: str, pipeline: LoadedPipeline, weights: DeviceWeights[Any]) -> None:
        self._name = name
        self._weights = weights
        self._pipeline: LoadedPipeline | None = pipeline
        self._has_token_types = "token_type_ids" in getattr(pipeline.tokenizer, "model_input_names", ())
        self._padding_token = pipeline.tokenizer.pad_token_id or 0

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Compute the vectors of a batch of texts, [rows, 1]."""
        pipeline = self._pipeline
        if pipeline is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        set_threads(pipeline.threads)
        rows = self._tokenize(pipeline, inputs[TEXT_INPUT].ravel())
        counts = np.array([len(row) for row in rows], np.int32).reshape(-1, 1)
        if EMBEDDING not in requested:
            return {TOKEN_COUNT: counts}
        with computing(self._name, self._weights):
            vectors = self._embed(pipeline, rows)
        return {EMBEDDING: vectors, TOKEN_COUNT: counts}

    def close(self) -> None:
        """Release the model."""
        self._pipeline = None

    def _tokenize(self, pipeline: LoadedPipeline, texts: Iterable[bytes]) -> list[list[int]]:
        prepared: list[str] = []
        most = pipeline.max_tokens * CHARACTERS_PER_TOKEN
        for raw in texts:
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                raise InvalidArgument(f"input '{TEXT_INPUT}' has a text that is not UTF-8: encode it so") from None
            if len(text) > most:
                if not pipeline.truncate:
                    raise InvalidArgument(
                        f"input '{TEXT_INPUT}' has a text of {len(text)} characters, and model '{self._name}' reads at most "
                        f"{pipeline.max_tokens} tokens: send less text at a time"
                    )
                text = text[:most]
            text = pipeline.prompt + text
            prepared.append(text.lower() if pipeline.lower_case else text)
        if not prepared:
            return []
        rows: list[list[int]] = pipeline.tokenizer(
            prepared,
            truncation=pipeline.truncate,
            max_length=pipeline.max_tokens if pipeline.truncate else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for row in rows:
            if len(row) > pipeline.max_tokens:
                raise InvalidArgument(
                    f"input '{TEXT_INPUT}' has a text of {len(row)} tokens, and model '{self._name}' reads at most "
                    f"{pipeline.max_tokens}: send less text at a time, or set parameter truncate: true for the model"
                )
            if not row:
                raise InvalidArgument(f"input '{TEXT_INPUT}' has a text without tokens: send some text")
        return rows

    def _embed(self, pipeline: LoadedPipeline, rows: list[list[int]]) -> Array:
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        parts = [
            self._embed_group(pipeline, [rows[index] for index in group]) for group in group_by_length(order, rows)
        ]
        if not parts:
            return np.zeros((0, pipeline.size), np.float32)
        joined = torch.cat(parts)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        array: Array = joined[back.to(joined.device)].cpu().numpy()
        return array

    def _embed_group(self, pipeline: LoadedPipeline, rows: list[list[int]]) -> Any:
        width = len(rows[0])
        ids = torch.tensor([row + [self._padding_token] * (width - len(row)) for row in rows]).to(pipeline.device)
        lengths = torch.tensor([len(row) for row in rows]).to(pipeline.device)
        mask = (torch.arange(width, device=pipeline.device) < lengths.unsqueeze(1)).long()
        more = {"token_type_ids": torch.zeros_like(ids)} if self._has_token_types else {}
        hidden = pipeline.model(input_ids=ids, attention_mask=mask, **more).last_hidden_state
        vector = torch.cat([pool(hidden, mask, mode) for mode in pipeline.poolings], 1).float()
        for weight, bias, activation in pipeline.dense:
            vector = torch.nn.functional.linear(vector, weight, bias)
            vector = _ACTIVATIONS[activation](vector) if activation in _ACTIVATIONS else vector
        return torch.nn.functional.normalize(vector, dim=1) if pipeline.normalize else vector


def group_by_length(order: list[int], rows: list[list[int]]) -> list[list[int]]:
    """Group row indices, the longest first, so that no row is much shorter than the longest of its group."""
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        length = len(rows[index])
        similar = longest <= _SHORT_TOKENS or 2 * length >= longest
        if not groups or not similar or (len(groups[-1]) + 1) * longest > _MAX_GROUP_TOKENS:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return groups


def pool(hidden: Any, mask: Any, mode: str) -> Any:
    """Pool `hidden` [rows, tokens, size] with `mask` [rows, tokens] (0 for padding) to [rows, size]."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        # Rows are padded on the right.
        last = mask.sum(1) - 1
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
    present = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "max":
        return hidden.masked_fill(present == 0, torch.finfo(hidden.dtype).min).amax(1)
    return (hidden * present).sum(1) / present.sum(1)
