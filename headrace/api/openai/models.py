# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/models`, and the model or LoRA adapter that a request names.

Listed are models that generate text or embeddings, rank texts or transcribe speech. A model's parameter `adapters`
("name=path,name=path") names its adapters, and others may be loaded on demand (`models.adapters`); a model takes precedence
over an adapter of the same name.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from headrace.api.openai.errors import BadRequest, ModelNotFound
from headrace.api.openai.fields import Fields
from headrace.core.errors import Code, HeadraceError
from headrace.core.generation import DOCUMENT, EMBEDDING, QUERY, SCORE, TEXT_INPUT
from headrace.core.names import nearest
from headrace.core.transcription import AUDIO, OPTIONS, TRANSCRIPT
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.models.adapters import ModelAdapters
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

ADAPTERS, MAX_MODEL_LEN = "adapters", "max_model_len"
_GENERATING = ("llm", "openai_proxy")
_NAME_CHARACTERS = 256
_NAMES_SECONDS = 1.0
_OWNER = "headrace"


class Target(NamedTuple):
    """The model of a request."""

    requested_name: str
    """The name in the request: a model or an adapter."""
    config: ModelConfig
    adapter: str

    @property
    def proxied(self) -> bool:
        """Whether another engine answers, which speaks OpenAI's protocol itself."""
        return self.config.backend == "openai_proxy"


class Models:
    """The models of one data plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._first_seen: WeakKeyDictionary[ServingVersion, int] = WeakKeyDictionary()
        """When each version was first listed."""
        self._first_listed: dict[str, int] = {}
        """The same for models that are not loaded, by name."""
        self._last_names: builtins.list[str] = []
        self._names_until = 0.0

    def generative_model(self, fields: Fields) -> Target:
        """Return the `model` of a chat or completions request."""
        target = self._target(fields)
        if not _generates(target.config):
            hint = "it embeds texts: use /v1/embeddings" if _embeds(target.config) else "use /v2/models/NAME/infer"
            hint = "it ranks texts: use /v1/rerank" if ranks(target.config) else hint
            hint = "it transcribes speech: use /v1/audio/transcriptions" if _transcribes(target.config) else hint
            raise BadRequest("model", f"'{target.requested_name}' does not generate text: {hint}")
        return target

    def tokenizing_model(self, fields: Fields) -> Target:
        """Return the `model` of a tokenize or detokenize request; without one, the only model that generates text."""
        if fields.get("model") is not None:
            return self.generative_model(fields)
        configs = [config for _, config in self._known() if _generates(config)]
        if len(configs) != 1:
            raise fields.error("model", "is missing: give the name of a model, as listed by GET /v1/models")
        self._plane.check_loaded(configs[0].name)
        return Target(configs[0].name, configs[0], "")

    def embedding_model(self, fields: Fields) -> Target:
        """Return the `model` of an embeddings request."""
        target = self._target(fields)
        if not (_embeds(target.config) or target.proxied):
            raise BadRequest("model", f"'{target.requested_name}' does not embed texts: it has no output '{EMBEDDING}'")
        return target

    def ranking_model(self, fields: Fields) -> Target:
        """Return the `model` of a rerank or score request."""
        target = self._target(fields)
        if not (ranks(target.config) or _embeds(target.config) or target.proxied):
            raise BadRequest(
                "model",
                f"'{target.requested_name}' does not compare texts: use a cross-encoder or an embedding model, which GET "
                "/v1/models lists",
            )
        return target

    def speech_model(self, fields: Fields) -> Target:
        """Return the `model` of a transcription or translation."""
        target = self._target(fields)
        if target.proxied:
            raise BadRequest("model", f"'{target.requested_name}' is another engine's, to which no audio is forwarded")
        if not _transcribes(target.config):
            raise BadRequest("model", f"'{target.requested_name}' does not transcribe speech: use a Whisper model")
        return target

    def list(self, exchange: Exchange) -> None:
        """Answer `GET /v1/models`."""
        exchange.respond(OK_JSON, orjson.dumps({"object": "list", "data": list(self._listed().values())}))

    def show(self, exchange: Exchange) -> None:
        """Answer `GET /v1/models/{id}`."""
        model = self._listed().get(exchange.params[0])
        if model is None:
            raise self._unknown(exchange.params[0])
        exchange.respond(OK_JSON, orjson.dumps(model))

    def _target(self, fields: Fields) -> Target:
        name = fields.text("model", _NAME_CHARACTERS)
        if not name:
            raise fields.error("model", "is missing: give the name of a model, as listed by GET /v1/models")
        version = self._plane.find(name)
        if version is not None:
            return Target(name, version.config, "")
        self._plane.check_loaded(name)
        for base, config in self._known():
            if name in _adapters(config) or self._is_on_demand(base, name):
                self._plane.check_loaded(base)
                return Target(name, config, name)
        raise self._unknown(name)

    @property
    def started(self) -> bool:
        """Whether the initial loading of models has finished."""
        return self._plane.started

    def is_model(self, name: str) -> bool:
        """Return whether a model has this name."""
        return self._plane.known_config(name) is not None

    def check_loaded(self, name: str) -> None:
        """Raise for a model that loads on demand and is not loaded."""
        self._plane.check_loaded(name)

    def named(self, base: str) -> builtins.list[str]:
        """Return the adapters of a model's parameter `adapters`."""
        config = self._plane.known_config(base)
        return [] if config is None else _adapters(config)

    def with_adapters(self) -> dict[str, ModelAdapters]:
        """Return the adapters of the models that load some on demand, by model."""
        found = {name: self._plane.adapters_of(name) for name, _ in self._known()}
        return {name: adapters for name, adapters in found.items() if adapters is not None}

    def _is_on_demand(self, base: str, name: str) -> bool:
        adapters = self._plane.adapters_of(base)
        return adapters is not None and adapters.find(name) is not None

    def _known(self) -> Iterator[tuple[str, ModelConfig]]:
        """Return the configurations of all models, also of those that load when they are asked."""
        for name in self._plane.known_names():
            config = self._plane.known_config(name)
            if config is not None:
                yield name, config

    def _unknown(self, name: str) -> HeadraceError:
        """Return the error for a name: a model that is loading or failed to load, or none."""
        try:
            self._plane.config(name)
        except HeadraceError as error:
            if error.code is Code.UNAVAILABLE:
                return error
        close = nearest(name, self._names())
        hint = f"did you mean '{close}'? " if close else ""
        return ModelNotFound(
            f"The model {name[:_NAME_CHARACTERS]!a} does not exist: {hint}GET /v1/models lists the models"
        )

    def _names(self) -> builtins.list[str]:
        """Return all names, at most a second old: folders of adapters may be long, and unknown names frequent."""
        now = time.monotonic()
        if now >= self._names_until:
            self._last_names, self._names_until = [*self._listed()], now + _NAMES_SECONDS
        return self._last_names

    def _listed(self) -> dict[str, dict[str, Any]]:
        models: dict[str, dict[str, Any]] = {}
        adapters: dict[str, dict[str, Any]] = {}
        for name, config in self._known():
            if not _is_listed(config):
                continue
            created = self._created(name)
            models[name] = _model(name, created, config.parameters)
            on_demand = self._plane.adapters_of(name)
            for adapter in (*_adapters(config), *(on_demand.names() if on_demand is not None else ())):
                adapters.setdefault(adapter, {**models[name], "id": adapter, "root": name, "parent": name})
        return {**adapters, **models}

    def _created(self, name: str) -> int:
        version, now = self._plane.find(name), int(time.time())
        return (
            self._first_listed.setdefault(name, now) if version is None else self._first_seen.setdefault(version, now)
        )


def _model(name: str, created: int, parameters: Mapping[str, str]) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": _OWNER, "root": name}
    length = parameters.get(MAX_MODEL_LEN, "")
    if length.isdecimal():
        model[MAX_MODEL_LEN] = int(length)
    return model


def _generates(config: ModelConfig) -> bool:
    # As it is written, the configuration of a model that was never loaded may not have its outputs yet.
    return config.backend in _GENERATING and (config.decoupled or not config.outputs)


def _embeds(config: ModelConfig) -> bool:
    inputs = {spec.name for spec in config.inputs}
    return TEXT_INPUT in inputs and any(spec.name == EMBEDDING for spec in config.outputs)


def ranks(config: ModelConfig) -> bool:
    """Return whether a model scores pairs of texts."""
    inputs = {spec.name for spec in config.inputs}
    return inputs == {QUERY, DOCUMENT} and any(spec.name == SCORE for spec in config.outputs)


def _is_listed(config: ModelConfig) -> bool:
    return _generates(config) or _embeds(config) or ranks(config) or _transcribes(config)


def _transcribes(config: ModelConfig) -> bool:
    inputs = {spec.name for spec in config.inputs}
    return inputs == {AUDIO, OPTIONS} and any(spec.name == TRANSCRIPT for spec in config.outputs)


def _adapters(config: ModelConfig) -> list[str]:
    if config.backend != "llm":
        return []
    pairs = config.parameters.get(ADAPTERS, "").split(",")
    return [name for name in (pair.partition("=")[0].strip() for pair in pairs) if name]
