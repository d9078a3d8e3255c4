# SPDX-License-Identifier: Apache-2.0
"""The model looks at the pictures of a prompt, once, and its language model gets what it saw.

Used in the engine's thread when a request is admitted. The model's own forward runs until it calls its language model; what
it was about to give it (embeddings, positions, features for deeper layers) is kept as the sequence's `Extras`, and the
runner computes the prompt from these in chunks, with whatever else is in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from headrace.backends.llm.adapters.layers import Adapters
from headrace.backends.llm.running.runner import Extras, Runner
from headrace.backends.llm.seeing.prepared import Prepared
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, ResourceExhausted

log = logging.getLogger("headrace.backends.llm")

_DEEP = "deepstack_visual_embeds"
_DEEP_ROWS = "visual_pos_masks"
_TAKEN = ("inputs_embeds", "position_ids", _DEEP, _DEEP_ROWS)
_NEEDLESS = ("input_ids", "attention_mask", "past_key_values", "use_cache", "cache_position", "return_dict")
"""What a language model is given of which a prompt alone has nothing to say."""


class _Seen(Exception):
    """Stops a forward, with what the language model was to get."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Looker:
    """Of one model on one device."""

    def __init__(self, runner: Runner, adapters: Adapters | None = None) -> None:
        self._model = runner.model.base_model
        self._device = runner.device
        self._adapters = adapters
        language = getattr(self._model, "language_model", None)
        if language is None:
            raise FailedPrecondition(
                f"models of class {type(runner.model).__name__} cannot be served with images by backend 'llm': serve it "
                "with another engine through backend 'openai_proxy'"
            )
        self._language = language
        self._deep: list[torch.Tensor] | None = None
        self._gives_deep = False
        runner.more_arguments = self._keep_deep

    def look(self, prepared: Prepared, adapter: str = "") -> Extras:
        """What the sequence of this prompt brings with it."""
        arguments = {key: value.to(self._device) for key, value in prepared.arguments.items()}
        ids = torch.tensor([prepared.tokens], device=self._device)
        try:
            with torch.inference_mode(), self._adapters.everywhere(adapter) if self._adapters else nullcontext():
                return self._extras(self._seen(ids, arguments))
        except HeadraceError:
            raise
        except torch.OutOfMemoryError:
            raise ResourceExhausted(
                "not enough memory to look at these images or videos: send fewer or smaller ones"
            ) from None
        except Exception:
            log.exception("a model could not look at a request's images")
            raise Internal(
                "the model failed to look at these images or videos; the server's log has the details"
            ) from None

    def _seen(self, ids: torch.Tensor, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        hook = self._language.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self._model(input_ids=ids, use_cache=False, **arguments)
        except _Seen as seen:
            return seen.arguments
        finally:
            hook.remove()
        raise Internal("the model did not call its language model")

    def _extras(self, given: Mapping[str, Any]) -> Extras:
        for name, value in given.items():
            if name not in _TAKEN and name not in _NEEDLESS and isinstance(value, torch.Tensor | list | dict):
                raise _refused(self._model, name)
        if given.get("attention_mask") is not None:
            raise _refused(self._model, "attention_mask")
        embeddings, positions = given["inputs_embeds"][0], given.get("position_ids")
        extras = Extras(embeddings=embeddings)
        if positions is not None and positions.ndim == 3:
            # Of four rows the first is for the mask of attention.
            extras.positions = positions[-3:, 0]
            extras.delta = int(extras.positions.max()) + 1 - len(embeddings)
        deep = given.get(_DEEP)
        if deep is not None:
            rows, whole = given[_DEEP_ROWS][0], {}
            for place, features in enumerate(deep):
                whole[f"deep{place}"] = torch.zeros_like(embeddings)
                whole[f"deep{place}"][rows] = features.to(embeddings.dtype)
            extras.arguments = whole
            self._watch()
        return extras

    def _watch(self) -> None:
        """Have the language model take features for its deeper layers, which the forward around it does not hand on."""
        if not self._gives_deep:
            self._gives_deep = True
            self._language.register_forward_pre_hook(self._give_deep, with_kwargs=True)

    def _keep_deep(self, packed: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """For `Runner.more_arguments`: they wait here until the language model is called."""
        self._deep = [packed[f"deep{place}"][0] for place in range(len(packed))]
        return {}

    def _give_deep(self, module: Any, given: Any, named: dict[str, Any]) -> Any:
        deep, self._deep = self._deep, None
        if deep is None:
            return None
        # For every row, zeros where there is nothing to add: that costs less than to gather.
        rows = torch.ones(1, len(deep[0]), dtype=torch.bool, device=deep[0].device)
        return given, {**named, _DEEP: deep, _DEEP_ROWS: rows}


def _stop(_module: Any, _given: Any, named: Mapping[str, Any]) -> None:
    raise _Seen(named)


def _refused(model: Any, name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"models of class {type(model).__name__} cannot be served with images by backend 'llm': they give '{name}' to their "
        "language model; serve it with another engine through backend 'openai_proxy'"
    )
