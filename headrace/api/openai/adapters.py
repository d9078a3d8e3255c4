# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM: adapters of a model while the server runs.

    {"lora_name": "pirate", "lora_path": "pirate-v2", "load_inplace": false, "base_model_name": "llama"}

A path is below the model's folder of adapters, or a repository of the Hub that its configuration allows. An adapter is read
and checked before the answer; requests then name it as their model. `base_model_name` is needed if several models take
adapters.
"""

from __future__ import annotations

import asyncio

from headrace.api.openai.errors import BadRequest, ModelNotFound, fail
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.core.names import nearest
from headrace.models.adapters import FOLDER, HUB, ModelAdapters
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_OK_TEXT = ResponseHead(200, [(CONTENT_TYPE, b"text/plain; charset=utf-8")])
_RETRY_SECONDS = 1.0
_NAME_CHARACTERS, _PATH_CHARACTERS = 255, 4096


class Adapters:
    """Handlers over the models of one data plane."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def load(self, exchange: Exchange) -> None:
        """Load an adapter and give it a name."""
        fields = parse_body(exchange)
        name, path = _required(fields, "lora_name", _NAME_CHARACTERS), _required(fields, "lora_path", _PATH_CHARACTERS)
        in_place = fields.boolean("load_inplace")
        adapters = self._adapters(fields)
        if name in self._models.named(adapters.model):
            raise fields.error("lora_name", f"{name!a} is in the model's parameter adapters: choose another name")
        if self._models.is_model(name):
            raise fields.error("lora_name", f"{name!a} is the name of a model: choose another name")
        if adapters.is_registered(name) and not in_place:
            raise fields.error(
                "lora_name",
                f"the LoRA adapter {name!a} has been loaded already: set load_inplace to true to load it again",
            )
        source = adapters.source(name, path)
        loop = asyncio.get_running_loop()

        def loaded(error: HeadraceError | None) -> None:
            if error is None:
                adapters.register(source)
            if exchange.closed:
                return
            if error is not None:
                fail(exchange, error)
                return
            exchange.respond(_OK_TEXT, f"Success: LoRA adapter '{name}' added successfully.".encode())

        def done(error: HeadraceError | None) -> None:
            try:
                loop.call_soon_threadsafe(loaded, error)
            except RuntimeError:  # the loop is closed, so no request waits
                return

        self._models.check_loaded(adapters.model)
        adapters.require_loader().load(source, done)

    def unload(self, exchange: Exchange) -> None:
        """Drop an adapter from memory; one that was loaded by `load` has its name no longer."""
        fields = parse_body(exchange)
        name = _required(fields, "lora_name", _NAME_CHARACTERS)
        adapters = self._adapters(fields)
        if name in self._models.named(adapters.model):
            raise FailedPrecondition(
                f"adapter {name!a} is in the parameter adapters of model '{adapters.model}': it goes with the model"
            )
        if adapters.find(name) is None:
            close = nearest(name, adapters.names())
            hint = f"did you mean '{close}'?" if close else "GET /v1/models lists the adapters"
            raise ModelNotFound(f"the LoRA adapter {name!a} cannot be found: {hint}")
        adapters.remove(name)
        if adapters.loader is not None:
            adapters.loader.forget(name)
        text = f"Success: LoRA adapter '{name}' removed successfully."
        if adapters.find(name) is not None:
            text += " The next request that names it loads it again."
        exchange.respond(_OK_TEXT, text.encode())

    def _adapters(self, fields: Fields) -> ModelAdapters:
        """Return the adapters of the model that a request names, or of the only one that loads some on demand."""
        base = fields.text("base_model_name", _NAME_CHARACTERS)
        known = self._models.with_adapters()
        if base is not None and base in known:
            return known[base]
        if not self._models.started:
            raise Unavailable(
                "the models of this server are loading: try again soon", retry_after_seconds=_RETRY_SECONDS
            )
        if base is not None or not known:
            which = f"model {base!a}" if base is not None else "no model"
            has = "loads no adapters" if base is not None else "loads adapters"
            raise FailedPrecondition(
                f"{which} {has} on demand: set its parameter {FOLDER}, {HUB} or max_adapters, and load it again"
            )
        if len(known) > 1:
            raise fields.error("base_model_name", f"is missing: it is one of {', '.join(sorted(known))}")
        return next(iter(known.values()))


def _required(fields: Fields, name: str, most: int) -> str:
    value = fields.text(name, most)
    if not value:
        example = {"lora_name": "pirate", "lora_path": "pirate-v2"}[name]
        raise BadRequest(name, f'is missing: send a text, such as "{example}"')
    return value
