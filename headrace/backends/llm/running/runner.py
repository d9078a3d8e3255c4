# SPDX-License-Identifier: Apache-2.0
"""Computes a step: pieces of sequences in, logits or the likeliest tokens out.

Called by the engine's thread only. The pieces are packed into one row of tokens (`packing`), the model of transformers
computes it with `attention.PagedAttention` in place of its own attention, and the head is applied only to the rows
after which a token is sampled.

    step = runner.launch(pieces, greedy=True)     # returns as soon as the device has its work
    ...                                           # with `runner.ahead`: launch the next one
    tokens = step.tokens()                        # waits; one for each piece that samples, in their order
    logits = step.logits                          # or these [rows, vocabulary], of a step that is not greedy

**What a sequence may carry** (`Sequence.extras`, an `Extras`; made by `seeing`): embeddings of its prompt in place of
ids, its own position ids, and tensors per token for the model. **Adapters**: `before_forward` is called with the
packed pieces, in the order of their rows, just before the model computes.

`graphs.GraphRunner` does the same with CUDA graphs: it overrides `launch`, and sets `ahead`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.backends.llm.running.attention import PagedAttention
from headrace.backends.llm.running.kv_cache import KVCache
from headrace.backends.llm.running.packing import Packed, pack
from headrace.backends.llm.scheduling.sequences import Piece


@dataclass(slots=True)
class Extras:
    """What a sequence brings besides its tokens. All tensors lie on the runner's device, in its dtype where they float."""

    embeddings: torch.Tensor | None = None
    """Of the prompt, `[prompt_length, hidden]`: used in place of the tokens' own."""
    positions: torch.Tensor | None = None
    """Of the prompt, `[3, prompt_length]`."""
    delta: int = 0
    """The position of token i behind the prompt is i + delta, in all three rows."""
    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """More for the model, `[prompt_length, ...]` each: cut and packed as the tokens are, with zeros for all others, and
    given to `Runner.more_arguments`, which makes keyword arguments of them."""


class Step:
    """A step that has been given to the device."""

    __slots__ = ("_logits", "pieces")

    def __init__(self, pieces: Sequence[Piece], logits: torch.Tensor) -> None:
        self.pieces = pieces
        self._logits = logits

    @property
    def logits(self) -> torch.Tensor:
        """`[rows, vocabulary]` in float32, a row for each piece that samples, in their order."""
        return self._logits.float()

    def tokens(self) -> list[int]:
        """The likeliest token of each row. Waits for the device."""
        if not len(self._logits):
            return []
        tokens: list[int] = self._logits.argmax(dim=-1).tolist()
        return tokens


class Runner:
    """A model and its cache on one device."""

    ahead = False
    """Whether `launch` takes pieces whose token is not known: then a step may be launched before the last is read."""

    def __init__(self, model: Any, attention: PagedAttention, cache: KVCache, *, page_size: int) -> None:
        self.model = model
        """Of transformers, with a head: called with `inputs_embeds` or `input_ids`, `position_ids`, `logits_to_keep`."""
        self.attention = attention
        self.cache = cache
        self.page_size = page_size
        self.device: torch.device = cache.device
        self.dtype: torch.dtype = cache.dtype
        self.position_rows = position_rows(model.config)
        """1, or 3 for models whose positions are time, height and width."""
        self.before_forward: Callable[[Sequence[Piece]], None] | None = None
        """Called before each forward with the pieces in the order of their rows; `Piece.sequence.adapter` names the
        adapter. Set by `adapters`."""
        self.more_arguments: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] | None = None
        """Makes keyword arguments for the model of the packed `Extras.arguments`. Set by `seeing`."""
        self._embed = model.get_input_embeddings()

    def launch(self, pieces: Sequence[Piece], *, greedy: bool) -> Step:
        """Give a step to the device. Pieces of one token come first.

        With `greedy` nobody will ask for `logits`.
        """
        with torch.inference_mode():
            return Step(pieces, self.forward(pack(pieces, self)))

    def forward(self, packed: Packed) -> torch.Tensor:
        """The logits of the rows that sample. Without waiting for the device."""
        if self.before_forward is not None:
            self.before_forward(packed.pieces)
        arguments: dict[str, Any] = {}
        if packed.arguments and self.more_arguments is not None:
            arguments.update(self.more_arguments(packed.arguments))
        if packed.embeddings is not None:
            arguments["inputs_embeds"] = packed.embeddings
        else:
            arguments["input_ids"] = packed.ids
        with self.attention.of_step(packed.layout):
            output = self.model(
                position_ids=packed.positions,
                logits_to_keep=packed.sampled,
                use_cache=False,
                return_dict=True,
                **arguments,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, `[count, hidden]`."""
        embeddings: torch.Tensor = self._embed(ids)
        return embeddings

    def close(self) -> None:
        """Let go of the memory, the device's too."""
        self.attention.close()
        self.cache.close()
        del self.model, self._embed
        gc.collect()  # models of transformers are full of circles, and large
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def position_rows(config: Any) -> int:
    """3 where the model's rotary embedding has sections for time, height and width."""
    text = config.get_text_config()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text, name, None)
        if isinstance(parameters, Mapping) and "mrope_section" in parameters:
            return 3
    return 1
