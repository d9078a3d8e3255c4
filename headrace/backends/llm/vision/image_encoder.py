# SPDX-License-Identifier: Apache-2.0
"""The image encoder: runs the vision part of a model once per prompt, for the language model to use.

Called in the engine's thread when a request is admitted. The model's forward pass runs until it calls its language model;
the arguments of that call (embeddings, positions, deepstack features) become the sequence's `PromptInputs`. The model
runner then computes the prompt from them in chunks, together with the other sequences of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from headrace.backends.llm.lora import LoraAdapters
from headrace.backends.llm.model_runner.runner import ModelRunner, PromptInputs
from headrace.backends.llm.vision.inputs import MultimodalPrompt
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, ResourceExhausted

log = logging.getLogger("headrace.backends.llm")

_DEEPSTACK = "deepstack_visual_embeds"
_DEEPSTACK_MASK = "visual_pos_masks"
_USED_ARGUMENTS = ("inputs_embeds", "position_ids", _DEEPSTACK, _DEEPSTACK_MASK)
_IGNORED_ARGUMENTS = ("input_ids", "attention_mask", "past_key_values", "use_cache", "cache_position", "return_dict")
"""Arguments of a language model that carry nothing for a prompt alone."""


class _LanguageModelCall(Exception):
    """Stops a forward pass at the call of the language model, and carries its arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class ImageEncoder:
    """The image encoder of one model on one device."""

    def __init__(self, runner: ModelRunner, adapters: LoraAdapters | None = None) -> None:
        self._model = runner.model.base_model
        self._device = runner.device
        self._adapters = adapters
        language_model = getattr(self._model, "language_model", None)
        if language_model is None:
            raise FailedPrecondition(
                f"models of class {type(runner.model).__name__} cannot be served with images by backend 'llm': serve it "
                "with another engine through backend 'openai_proxy'"
            )
        self._language_model = language_model
        self._deepstack: list[torch.Tensor] | None = None
        self._passes_deepstack = False
        runner.extra_arguments = self._keep_deepstack

    def encode(self, prompt: MultimodalPrompt, adapter: str = "") -> PromptInputs:
        """Encode the images and videos of a prompt."""
        arguments = {key: value.to(self._device) for key, value in prompt.arguments.items()}
        ids = torch.tensor([prompt.tokens], device=self._device)
        try:
            with torch.inference_mode(), self._adapters.applied_to_all(adapter) if self._adapters else nullcontext():
                return self._prompt_inputs(self._call_arguments(ids, arguments))
        except HeadraceError:
            raise
        except torch.OutOfMemoryError:
            raise ResourceExhausted(
                "not enough memory to encode these images or videos: send fewer or smaller ones"
            ) from None
        except Exception:
            log.exception("The image encoder failed.")
            raise Internal(
                "the model failed to encode these images or videos; the server's log has the details"
            ) from None

    def _call_arguments(self, ids: torch.Tensor, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        hook = self._language_model.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self._model(input_ids=ids, use_cache=False, **arguments)
        except _LanguageModelCall as call:
            return call.arguments
        finally:
            hook.remove()
        raise Internal("the model did not call its language model")

    def _prompt_inputs(self, arguments: Mapping[str, Any]) -> PromptInputs:
        for name, value in arguments.items():
            known = name in _USED_ARGUMENTS or name in _IGNORED_ARGUMENTS
            if not known and isinstance(value, torch.Tensor | list | dict):
                raise _unsupported(self._model, name)
        if arguments.get("attention_mask") is not None:
            raise _unsupported(self._model, "attention_mask")
        embeddings, positions = arguments["inputs_embeds"][0], arguments.get("position_ids")
        prompt_inputs = PromptInputs(embeddings=embeddings)
        if positions is not None and positions.ndim == 3:
            # If there are four rows, the first is for the attention mask.
            prompt_inputs.positions = positions[-3:, 0]
            prompt_inputs.position_delta = int(prompt_inputs.positions.max()) + 1 - len(embeddings)
        deepstack = arguments.get(_DEEPSTACK)
        if deepstack is not None:
            rows, per_token = arguments[_DEEPSTACK_MASK][0], {}
            for layer, features in enumerate(deepstack):
                per_token[f"deep{layer}"] = torch.zeros_like(embeddings)
                per_token[f"deep{layer}"][rows] = features.to(embeddings.dtype)
            prompt_inputs.arguments = per_token
            self._start_passing_deepstack()
        return prompt_inputs

    def _start_passing_deepstack(self) -> None:
        """Pass deepstack features to the language model by a hook: the model's own forward does not forward them."""
        if not self._passes_deepstack:
            self._passes_deepstack = True
            self._language_model.register_forward_pre_hook(self._pass_deepstack, with_kwargs=True)

    def _keep_deepstack(self, packed: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Implement `ModelRunner.extra_arguments`: keep the features until the language model is called."""
        self._deepstack = [packed[f"deep{layer}"][0] for layer in range(len(packed))]
        return {}

    def _pass_deepstack(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        deepstack, self._deepstack = self._deepstack, None
        if deepstack is None:
            return None
        # For all rows, with zeros where there is nothing to add: cheaper than gathering rows.
        rows = torch.ones(1, len(deepstack[0]), dtype=torch.bool, device=deepstack[0].device)
        return args, {**kwargs, _DEEPSTACK: deepstack, _DEEPSTACK_MASK: rows}


def _stop(_module: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    raise _LanguageModelCall(kwargs)


def _unsupported(model: Any, name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"models of class {type(model).__name__} cannot be served with images by backend 'llm': they give '{name}' to their "
        "language model; serve it with another engine through backend 'openai_proxy'"
    )
