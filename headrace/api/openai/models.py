# SPDX-License-Identifier: Apache-2.0
"""Who answers to a name: models that generate or embed, and LoRA adapters of models; `GET /v1/models` lists them.

A model's parameter `adapters` ("name=path,name=path") names its adapters. A model comes before an adapter of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from headrace.api.openai.errors import ModelNotFound, Refused
from headrace.api.openai.fields import Fields
from headrace.core.errors import Code, HeadraceError
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

ADAPTERS, MAX_MODEL_LEN = "adapters", "max_model_len"
_GENERATING = ("llm", "openai_proxy")
_NAME_CHARACTERS = 256
_OWNER = "headrace"


class Target(NamedTuple):
    """Who is asked."""

    asked: str
    """By which name."""
    config: ModelConfig
    adapter: str

    @property
    def proxied(self) -> bool:
        """Whether another engine answers, in OpenAI's own words."""
        return self.config.backend == "openai_proxy"


class Models:
    """Over one data plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._seen: WeakKeyDictionary[ServingVersion, int] = WeakKeyDictionary()
        """When a version was seen for the first time."""

    def that_generates(self, fields: Fields) -> Target:
        """The `model` of a request for text."""
        target = self._target(fields)
        if not _generates(target.config):
            hint = "it embeds texts: use /v1/embeddings" if _embeds(target.config) else "use /v2/models/NAME/infer"
            raise Refused("model", f"'{target.asked}' does not generate text: {hint}")
        return target

    def that_embeds(self, fields: Fields) -> Target:
        """The `model` of a request for embeddings."""
        target = self._target(fields)
        if not (_embeds(target.config) or target.proxied):
            raise Refused("model", f"'{target.asked}' does not embed texts: it has no output '{EMBEDDING}'")
        return target

    def list(self, exchange: Exchange) -> None:
        """Answer `GET /v1/models`."""
        exchange.respond(OK_JSON, orjson.dumps({"object": "list", "data": list(self._shown().values())}))

    def show(self, exchange: Exchange) -> None:
        """Answer `GET /v1/models/{id}`."""
        shown = self._shown().get(exchange.params[0])
        if shown is None:
            raise self._unknown(exchange.params[0])
        exchange.respond(OK_JSON, orjson.dumps(shown))

    def _target(self, fields: Fields) -> Target:
        name = fields.text("model", _NAME_CHARACTERS)
        if not name:
            raise fields.refused("model", "is missing: give the name of a model, as GET /v1/models lists them")
        version = self._plane.find(name)
        if version is not None:
            return Target(name, version.config, "")
        for base in self._plane.model_names():
            found = self._plane.find(base)
            if found is not None and name in _adapters(found.config):
                return Target(name, found.config, name)
        raise self._unknown(name)

    def _unknown(self, name: str) -> HeadraceError:
        """A model that is loading, or failed to, says so; all others do not exist."""
        try:
            self._plane.config(name)
        except HeadraceError as error:
            if error.code is Code.UNAVAILABLE:
                return error
        return ModelNotFound(
            f"The model {name[:_NAME_CHARACTERS]!a} does not exist: GET /v1/models lists those that do"
        )

    def _shown(self) -> dict[str, dict[str, Any]]:
        shown: dict[str, dict[str, Any]] = {}
        adapters: dict[str, dict[str, Any]] = {}
        for name in self._plane.model_names():
            version = self._plane.find(name)
            if version is None or not (_generates(version.config) or _embeds(version.config)):
                continue
            created = self._seen.setdefault(version, int(time.time()))
            shown[name] = _model(name, created, version.config.parameters)
            for adapter in _adapters(version.config):
                adapters.setdefault(adapter, {**shown[name], "id": adapter, "root": name, "parent": name})
        return {**adapters, **shown}


def _model(name: str, created: int, parameters: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": _OWNER}
    length = parameters.get(MAX_MODEL_LEN, "")
    if length.isdecimal():
        made[MAX_MODEL_LEN] = int(length)
    return made


def _generates(config: ModelConfig) -> bool:
    return config.backend in _GENERATING and config.decoupled


def _embeds(config: ModelConfig) -> bool:
    inputs = {spec.name for spec in config.inputs}
    return TEXT_INPUT in inputs and any(spec.name == EMBEDDING for spec in config.outputs)


def _adapters(config: ModelConfig) -> list[str]:
    if config.backend != "llm":
        return []
    pairs = config.parameters.get(ADAPTERS, "").split(",")
    return [name for name in (pair.partition("=")[0].strip() for pair in pairs) if name]
