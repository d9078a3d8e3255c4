# SPDX-License-Identifier: Apache-2.0
"""Build the model of one rank: layers of the shard's sizes, and its part of the weights read into them.

transformers builds the model from a configuration with fewer heads, a smaller MLP and fewer tokens; it takes the memory of
the shard from the beginning.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from headrace.backends.llm.model_runner.model_loader import ModelFolder
from headrace.backends.llm.settings import LlmSettings
from headrace.backends.llm.tensor_parallel.communicator import Peers
from headrace.backends.llm.tensor_parallel.parallel_layers import parallelize
from headrace.backends.llm.tensor_parallel.shard_reader import ShardReader
from headrace.backends.llm.tensor_parallel.sharding import Sharding, check_architecture, localize, parts_of, sharding_of
from headrace.backends.torch_import import TRANSFORMERS
from headrace.backends.weight_files import check_memory
from headrace.core.errors import FailedPrecondition, Unimplemented

log = logging.getLogger("headrace.backends.llm")


def check_shardable(checked: ModelFolder, settings: LlmSettings) -> None:
    """Refuse a model that cannot be sharded as its settings say, before anything is started."""
    check_architecture(checked.architecture)
    if checked.quantized is not None or settings.quantization:
        raise Unimplemented(
            "parameter tensor_parallel: quantised weights are not sharded; use weights of 16 bits, or leave it out"
        )
    sharding_of(checked.architecture, _read_config(checked), 0, settings.tensor_parallel)


def load_shard(checked: ModelFolder, settings: LlmSettings, device: torch.device, peers: Peers) -> Any:
    """Load the shard of a rank onto its device."""
    config = _read_config(checked)
    sharding = sharding_of(checked.architecture, config, peers.rank, peers.degree)
    dtype = _dtype(config, settings, device)
    if device.type == "cpu":
        check_memory(checked.path, checked.weights, dtype.itemsize, settings.max_weight_bytes)
    vocabulary, padding_token = config.vocab_size, config.pad_token_id
    localize(config, sharding)
    config.pad_token_id = None  # it may be a token of another rank
    model_class = getattr(transformers, checked.architecture)
    with TRANSFORMERS, no_init_weights(), torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
    config.vocab_size, config.pad_token_id = vocabulary, padding_token
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    with torch.inference_mode():
        _read_weights(checked, model, sharding)
    parallelize(model, sharding, peers)
    model.requires_grad_(False)
    model.eval()
    return model


def _read_weights(checked: ModelFolder, model: Any, sharding: Sharding) -> None:
    with ShardReader(checked.path) as reader:
        stored = frozenset(reader.headers)
        parts = {
            name: parts_of(name, parameter.shape, sharding, stored) for name, parameter in model.named_parameters()
        }
        missing = sorted({part.stored for found in parts.values() for part in found} - stored)
        if missing:
            raise FailedPrecondition(
                f"the weights in '{checked.path.name}' lack {len(missing)} tensors of {checked.architecture}, such as "
                f"'{missing[0]}': copy the whole model folder"
            )
        for name, parameter in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter[sharding.tokens[1] - sharding.tokens[0] :] = 0  # padding
            for part in parts[name]:
                reader.read(part, parameter)


def _read_config(checked: ModelFolder) -> Any:
    try:
        with TRANSFORMERS:
            return AutoConfig.from_pretrained(checked.path, local_files_only=True)
    except Exception:
        log.exception("transformers cannot read the configuration of %s.", checked.path)
        raise FailedPrecondition(
            f"transformers {transformers.__version__} cannot read '{checked.path.name}/config.json': the server's log has "
            "the details"
        ) from None


def _dtype(config: Any, settings: LlmSettings, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    if device.type == "cpu":
        return torch.float32  # as in `model_loader`
    return config.dtype or torch.bfloat16
