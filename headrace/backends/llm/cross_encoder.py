# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder (reranker) on PyTorch: scores how well a document answers a query.

The `llm` backend uses it for folders of a `...ForSequenceClassification` model with one label. Loading, batching by length
and the parameters are those of `embedding.model`. A score is the sigmoid of the model's output, as in vLLM, unless the
folder's `config.json` names another activation, as sentence-transformers writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array, Placement, SleepLevel
from headrace.backends.llm.embedding.config import read_transformer_config
from headrace.backends.llm.embedding.model import (
    CHARACTERS_PER_TOKEN,
    MAX_BATCH_SIZE,
    TOKEN_COUNT,
    group_by_length,
    max_tokens,
)
from headrace.backends.llm.encoder import (
    DeviceWeights,
    TransformerFolder,
    complete_transformer,
    computing,
    set_threads,
)
from headrace.backends.signature import Port, Signature, decode_text
from headrace.backends.torch_import import device_of
from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.core.generation import DOCUMENT, QUERY, SCORE
from headrace.models.config.types import ModelConfig

_ACTIVATIONS = {"Sigmoid": torch.sigmoid, "Identity": None}
_SIGNATURE = Signature(
    {QUERY: Port(QUERY, "text", BYTES, (-1, 1)), DOCUMENT: Port(DOCUMENT, "text", BYTES, (-1, 1))},
    {SCORE: Port(SCORE, "number", FP32, (-1, 1)), TOKEN_COUNT: Port(TOKEN_COUNT, "number", INT32, (-1, 1))},
    {},
)


def complete_config(config: ModelConfig, folder: Path) -> Any:
    """Add the tensors and the batch size to a configuration that leaves them out. For `contract.Backend.complete`."""
    return complete_transformer(config, folder, _SIGNATURE, MAX_BATCH_SIZE)


@dataclass(frozen=True, slots=True)
class LoadedCrossEncoder:
    """A model with its weights, and how texts become its input."""

    tokenizer: Any
    model: Any
    activation: Any
    """Applied to the output of the model; None: nothing."""
    max_tokens: int
    truncate: bool
    threads: int
    device: Any


class CrossEncoderModel:
    """One version of a cross-encoder. Instances on one device share the weights."""

    def __init__(self, files: TransformerFolder) -> None:
        self._files = files
        if files.config.num_labels != 1:
            raise Unimplemented(
                f"'{files.path.name}' classifies texts into {files.config.num_labels} labels, and a reranker has one: leave "
                "out parameter task"
            )
        self._activation = _ACTIVATIONS[_activation_name(files.path)]
        self._max_tokens = max_tokens(files.config, files.tokenizer, None, files.settings)
        self._weights = DeviceWeights(files.name, [files.path], self._load_weights, lambda model: [*model.parameters()])

    @classmethod
    def load(cls, config: ModelConfig, folder: Path) -> CrossEncoderModel:
        """Read the folder's configuration and tokenizer. The first instance on a device loads the weights."""
        return cls(TransformerFolder.read(config, folder, _SIGNATURE, "scores batches of texts", MAX_BATCH_SIZE))

    def open(self, placement: Placement) -> CrossEncoderInstance:
        """Return an instance; load the weights if it is the first on its device."""
        files = self._files
        device, settings = device_of(files.name, placement), files.settings
        loaded = LoadedCrossEncoder(
            tokenizer=files.tokenizer,
            model=self._weights.on(device),
            activation=self._activation,
            max_tokens=self._max_tokens,
            truncate=settings.truncate,
            threads=settings.threads if device.type == "cpu" else 0,
            device=device,
        )
        return CrossEncoderInstance(files.name, loaded, self._weights)

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """See `contract.SleepableModel`."""
        return self._weights.sleep(level)

    def wake(self) -> None:
        """See `contract.SleepableModel`."""
        self._weights.wake()

    def close(self) -> None:
        """Free the weights."""
        self._weights.clear()

    def _load_weights(self, device: torch.device) -> Any:
        from transformers import AutoModelForSequenceClassification

        return self._files.load_weights(AutoModelForSequenceClassification, device)


def _activation_name(folder: Path) -> str:
    """Return the name of the function that sentence-transformers applies to the output."""
    config = read_transformer_config(folder)
    section = config.get("sentence_transformers")
    name = section.get("activation_fn") if isinstance(section, Mapping) else None
    name = name or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise Unimplemented(
            f"'{folder.name}/config.json' has the activation '{kind[:64]}': this server supports {', '.join(_ACTIVATIONS)}"
        )
    return kind


@dataclass(frozen=True, slots=True)
class _Pair:
    """The tokens of a query and a document."""

    ids: list[int]
    types: list[int]
    """Which tokens are the document's, for models that want to know."""


class CrossEncoderInstance:
    """Scores batches of pairs. Implements `contract.ComputeInstance`."""

    def __init__(self, name: str, loaded: LoadedCrossEncoder, weights: DeviceWeights[Any]) -> None:
        self._name = name
        self._weights = weights
        self._loaded: LoadedCrossEncoder | None = loaded
        self._has_token_types = "token_type_ids" in getattr(loaded.tokenizer, "model_input_names", ())
        self._padding_token = loaded.tokenizer.pad_token_id or 0

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Compute the scores of a batch of pairs, [rows, 1]."""
        loaded = self._loaded
        if loaded is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        set_threads(loaded.threads)
        pairs = self._tokenize(loaded, decode_text(QUERY, inputs[QUERY]), decode_text(DOCUMENT, inputs[DOCUMENT]))
        counts = np.array([len(pair.ids) for pair in pairs], np.int32).reshape(-1, 1)
        if SCORE not in requested:
            return {TOKEN_COUNT: counts}
        with computing(self._name, self._weights):
            scores = self._score(loaded, pairs)
        return {SCORE: scores, TOKEN_COUNT: counts}

    def close(self) -> None:
        """Release the model."""
        self._loaded = None

    def _tokenize(self, loaded: LoadedCrossEncoder, queries: list[str], documents: list[str]) -> list[_Pair]:
        if not queries:
            return []
        most = loaded.max_tokens * CHARACTERS_PER_TOKEN
        for name, texts in ((QUERY, queries), (DOCUMENT, documents)):
            for index, text in enumerate(texts):
                if len(text) > most:
                    if not loaded.truncate:
                        raise InvalidArgument(
                            f"input '{name}' has a text of {len(text)} characters, and model '{self._name}' reads at most "
                            f"{loaded.max_tokens} tokens: send less text at a time"
                        )
                    texts[index] = text[:most]
        encoded = loaded.tokenizer(
            queries,
            documents,
            truncation=loaded.truncate,
            max_length=loaded.max_tokens if loaded.truncate else None,
            return_attention_mask=False,
            return_token_type_ids=self._has_token_types,
            verbose=False,
        )
        rows: list[list[int]] = encoded["input_ids"]
        for row in rows:
            if len(row) > loaded.max_tokens:
                raise InvalidArgument(
                    f"input '{DOCUMENT}' has a text of {len(row)} tokens together with its query, and model '{self._name}' "
                    f"reads at most {loaded.max_tokens}: send less text, or set parameter truncate: true for the model"
                )
            if not row:
                raise InvalidArgument(f"input '{DOCUMENT}' has a text without tokens: send some text")
        types = encoded["token_type_ids"] if self._has_token_types else [[0] * len(row) for row in rows]
        return [_Pair(*pair) for pair in zip(rows, types, strict=True)]

    def _score(self, loaded: LoadedCrossEncoder, pairs: list[_Pair]) -> Array:
        rows = [pair.ids for pair in pairs]
        scores = np.zeros((len(pairs), 1), np.float32)
        for group in group_by_length(sorted(range(len(rows)), key=lambda index: -len(rows[index])), rows):
            scores[group] = self._score_group(loaded, [pairs[index] for index in group])
        return scores

    def _score_group(self, loaded: LoadedCrossEncoder, pairs: list[_Pair]) -> Array:
        width = len(pairs[0].ids)
        padding, device = self._padding_token, loaded.device
        ids = torch.tensor([pair.ids + [padding] * (width - len(pair.ids)) for pair in pairs]).to(device)
        lengths = torch.tensor([len(pair.ids) for pair in pairs]).to(device)
        mask = (torch.arange(width, device=device) < lengths.unsqueeze(1)).long()
        more = {}
        if self._has_token_types:
            more["token_type_ids"] = torch.tensor([pair.types + [0] * (width - len(pair.types)) for pair in pairs]).to(
                device
            )
        logits = loaded.model(input_ids=ids, attention_mask=mask, **more).logits.float()
        scores = logits if loaded.activation is None else loaded.activation(logits)
        array: Array = scores.cpu().numpy()
        return array
