# SPDX-License-Identifier: Apache-2.0
"""Turn sections of the configuration into settings: `/predict`, media, access, traffic, and a single model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.api.predict.settings import InputChecks, PredictSettings, StreamSettings
from headrace.backends.devices import visible_gpus
from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB
from headrace.core.names import is_name
from headrace.engine.traffic.settings import SplitSettings, TrafficSettings, check_split, parse_split
from headrace.models.config.problems import Problem
from headrace.models.media.settings import MediaSettings
from headrace.models.staging import LATEST, SingleModel, model_name
from headrace.programs.configuration.keys import ENVIRONMENT
from headrace.programs.configuration.resolution import Configuration

DEFAULT_RATE = 1000
"""Requests per minute if a limit is enabled without a number."""

_RATE = "safeguards.rate_limit"
_CHECKS = "safeguards.input_validation"


def predict_settings(configuration: Configuration) -> PredictSettings | None:
    """Return the settings of `/predict`; None if it is switched off."""
    if not configuration.truth("predict.enabled"):
        return None
    get = configuration.get
    return PredictSettings(
        model=configuration.text("predict.model"),
        timeout_seconds=configuration.number("performance.inference_timeout_s"),
        checks=InputChecks(
            enabled=configuration.truth(f"{_CHECKS}.enabled"),
            most_numbers=configuration.whole(f"{_CHECKS}.max_inputs"),
            most_rows=configuration.whole(f"{_CHECKS}.max_rows"),
            longest_sequence=configuration.whole(f"{_CHECKS}.max_sequence_length"),
            least=get(f"{_CHECKS}.min"),
            most=get(f"{_CHECKS}.max"),
            allow_nan=configuration.truth(f"{_CHECKS}.allow_nan"),
        ),
        stream=StreamSettings(
            idle_seconds=configuration.number("stream.idle_timeout_s"),
            messages_per_second=configuration.number("stream.messages_per_second"),
            binary=configuration.truth("stream.binary"),
        ),
    )


def media_settings(configuration: Configuration) -> MediaSettings:
    """Return the settings for images and videos."""
    return MediaSettings(
        allow_hosts=tuple(configuration.get("media.allow_hosts") or ()),
        private_hosts=tuple(configuration.get("media.private_hosts") or ()),
        folders=tuple(Path(folder) for folder in configuration.get("media.folders") or ()),
        image_bytes=round(configuration.number("media.max_image_mb") * MIB),
        video_bytes=round(configuration.number("media.max_video_mb") * MIB),
        frames=configuration.whole("media.max_frames"),
        fetch_seconds=configuration.number("media.fetch_timeout_s"),
    )


def access_settings(configuration: Configuration) -> AccessSettings:
    """Return the settings of API keys, rate limits and concurrency."""
    keys_file = configuration.text("safeguards.api_keys_file")
    return AccessSettings(
        keys_file=Path(keys_file) if keys_file else None,
        rates=RateLimits(
            limits=_limits(configuration),
            user_header=configuration.text(f"{_RATE}.user_header").lower(),
            redis_url=configuration.text(f"{_RATE}.redis_url"),
            trusted_proxies=tuple(configuration.get(f"{_RATE}.trusted_proxies") or ()),
        ),
        concurrency=_concurrency(configuration),
    )


def _concurrency(configuration: Configuration) -> Concurrency:
    most = configuration.whole("safeguards.concurrency.max_in_flight")
    # Only if requests are counted: otherwise a timeout, which every server has, would make every server count.
    return Concurrency(most, configuration.number("performance.inference_timeout_s") if most else 0.0)


def traffic_settings(configuration: Configuration) -> TrafficSettings:
    """Return the traffic splits. Raises for an invalid split."""
    tree: Mapping[str, Any] = configuration.get("traffic") or {}
    try:
        splits = {model: _split(model, split) for model, split in tree.items()}
    except InvalidArgument as error:
        raise InvalidArgument(f"{_place(configuration, 'traffic')}: {error.message}") from None
    return TrafficSettings(splits)


def problems_of(configuration: Configuration) -> list[Problem]:
    """Return the mistakes that concern several keys."""
    found: list[Problem] = []

    def add(path: str, text: str) -> None:
        origin = configuration.settings[path].origin
        where = {"file": origin.name, "env": ENVIRONMENT, "flag": "command line"}.get(origin.kind, "configuration")
        field = path if origin.kind in ("file", "default") else origin.name
        found.append(Problem(where, origin.line or None, field, text))

    least, most = configuration.get(f"{_CHECKS}.min"), configuration.get(f"{_CHECKS}.max")
    if least is not None and most is not None and least > most:
        add(f"{_CHECKS}.max", f"is {most:g}, and min is {least:g}: no number would be taken")
    keys_file = configuration.text("safeguards.api_keys_file")
    if keys_file and not Path(keys_file).is_file():
        add("safeguards.api_keys_file", f"there is no file {keys_file[:200]!a}: name one, or make it")
    url = configuration.text(f"{_RATE}.redis_url")
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        add(f"{_RATE}.redis_url", "takes a URL such as redis://localhost:6379/0")
    if configuration.truth(f"{_RATE}.enabled") and configuration.get(f"{_RATE}.requests_per_minute") == 0:
        add(f"{_RATE}.requests_per_minute", "is 0, which is no limit: write a number, or enabled: false")
    for model, split in (configuration.get("traffic") or {}).items():
        try:
            _split(model, split)
        except InvalidArgument as error:
            add("traffic", error.message)
    return found


def _split(model: str, tree: object) -> SplitSettings:
    split = parse_split(tree, f"traffic.{model}")
    check_split(model, split)
    return split


def _limits(configuration: Configuration) -> tuple[RateLimit, ...]:
    enabled = configuration.get(f"{_RATE}.enabled")
    rows = configuration.get(f"{_RATE}.limits") or ()
    a_minute = configuration.get(f"{_RATE}.requests_per_minute")
    if enabled is False or not (enabled or rows or a_minute):
        return ()
    if a_minute is None:
        a_minute = 0 if rows else DEFAULT_RATE
    more = tuple(RateLimit(row["requests"], row["seconds"], row["by"], row["burst"]) for row in rows)
    if not a_minute:
        return more
    by, burst = configuration.get(f"{_RATE}.by"), configuration.whole(f"{_RATE}.burst")
    return (RateLimit(a_minute, 60.0, by, burst), *more)


def _place(configuration: Configuration, path: str) -> str:
    return str(configuration.settings[path].origin)


log = logging.getLogger("headrace.configuration")

_OF_THE_MODEL = frozenset(
    {
        *(f"performance.{name}" for name in ("max_batch_size", "batch_timeout_ms", "instances")),
        *("performance.queue_timeout_ms", "performance.max_queue_size", "cache.enabled"),
    }
)


def single_model(configuration: Configuration, split_models: Mapping[str, Any]) -> SingleModel | None:
    """Return the settings of `model`; None without `model.path`."""
    given = configuration.text("model.path")
    if not given:
        _tell_of_what_is_lost(configuration)
        return None
    path = Path(os.path.abspath(os.path.expanduser(given)))  # Links are followed at each poll.
    if not path.exists():
        raise configuration.wrong("model.path", f"{given!a} does not exist (looked for {str(path)!a}): name a model")
    name = configuration.text("model.name") or model_name(path)
    if not is_name(name):
        raise configuration.wrong("model.name", f"{name[:64]!a} is no model's name: use letters, digits, '_', '.', '-'")
    gpu, auto = _device(configuration)
    told = configuration.given
    return SingleModel(
        path,
        name,
        configuration.text("model.version") or LATEST,
        configuration.truth("model.serve_all_versions") or name in split_models,
        gpu,
        auto,
        configuration.whole("performance.instances") if told("performance.instances") else None,
        configuration.text("model.precision") or "fp32",
        configuration.get("performance.max_batch_size"),
        configuration.number("performance.batch_timeout_ms") if told("performance.batch_timeout_ms") else None,
        configuration.number("performance.queue_timeout_ms"),
        configuration.whole("performance.max_queue_size"),
        configuration.truth("cache.enabled"),
        configuration.get("model.inputs") or (),
        configuration.get("model.outputs") or (),
        _parameters(configuration),
    )


def _device(configuration: Configuration) -> tuple[int | None, bool]:
    """Return the GPU, and whether the server may choose."""
    device = configuration.text("model.device") or "auto"
    if device == "auto":
        return None, True
    if device == "cpu":
        return None, False
    number = device.partition(":")[2]
    gpus = visible_gpus()
    if not gpus:
        raise configuration.wrong(
            "model.device",
            f"{device} asks for a GPU, and this process sees none: write device: cpu, or device: auto to use a GPU only "
            "where there is one; in a container, give it the GPU (docker run --gpus all)",
        )
    if number and int(number) >= gpus:
        raise configuration.wrong("model.device", f"{device} is not there: the GPUs are cuda:0 to cuda:{gpus - 1}")
    return int(number) if number else -1, False


def _parameters(configuration: Configuration) -> dict[str, str]:
    made = {}
    for name, value in (configuration.get("model.parameters") or {}).items():
        if not isinstance(value, str | int | float):
            raise configuration.wrong("model.parameters", f"{name[:64]!a} takes a text or a number")
        made[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return made


def _tell_of_what_is_lost(configuration: Configuration) -> None:
    """Refuse settings of `model` without `model.path`; for environment variables only warn."""
    for path, setting in configuration.settings.items():
        if not (path.startswith("model.") or path in _OF_THE_MODEL) or not configuration.given(path):
            continue
        said = "is for the model at model.path, which is not given: add it"
        if setting.origin.kind == "env":
            log.warning("%s %s", setting.origin.name, said)
        elif setting.value not in (None, (), {}, False):
            raise configuration.wrong(path, f"{said}, or say it in the configurations of the models")
