# SPDX-License-Identifier: Apache-2.0
"""Turn sections of the configuration into settings: `/predict`, media, access, traffic, and a single model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.api.predict.settings import InputChecks, PredictSettings, StreamSettings
from headrace.backends.devices import visible_gpus
from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB
from headrace.core.names import is_name
from headrace.engine.traffic.settings import TrafficSettings
from headrace.models.media.settings import MediaSettings
from headrace.models.staging import LATEST, SingleModel, model_name
from headrace.models.storage.locations import HUB_SCHEMES, HubLocation, is_hub_name, parse_location, scheme_of
from headrace.programs.configuration.resolution import OptionValues, traffic_split

log = logging.getLogger("headrace.configuration")

DEFAULT_RATE = 1000
"""Requests per minute if a limit is enabled without a number."""

_RATE = "safeguards.rate_limit"
_CHECKS = "safeguards.input_validation"
_MODEL_KEYS = frozenset(
    {
        *(f"performance.{name}" for name in ("max_batch_size", "batch_timeout_ms", "instances")),
        *("performance.queue_timeout_ms", "performance.max_queue_size", "cache.enabled"),
    }
)
"""Keys outside the section `model` that apply only to its model."""


def predict_settings(values: OptionValues) -> PredictSettings | None:
    """Return the settings of `/predict`; None if it is switched off."""
    if not values.bool("predict.enabled"):
        return None
    get = values.get
    return PredictSettings(
        model=values.str("predict.model"),
        timeout_seconds=values.float("performance.inference_timeout_s"),
        checks=InputChecks(
            enabled=values.bool(f"{_CHECKS}.enabled"),
            most_numbers=values.int(f"{_CHECKS}.max_inputs"),
            most_rows=values.int(f"{_CHECKS}.max_rows"),
            longest_sequence=values.int(f"{_CHECKS}.max_sequence_length"),
            least=get(f"{_CHECKS}.min"),
            most=get(f"{_CHECKS}.max"),
            allow_nan=values.bool(f"{_CHECKS}.allow_nan"),
        ),
        stream=StreamSettings(
            idle_seconds=values.float("stream.idle_timeout_s"),
            messages_per_second=values.float("stream.messages_per_second"),
            binary=values.bool("stream.binary"),
        ),
    )


def media_settings(values: OptionValues) -> MediaSettings:
    """Return the settings for images and videos."""
    return MediaSettings(
        allow_hosts=values.strings("media.allow_hosts"),
        private_hosts=values.strings("media.private_hosts"),
        folders=tuple(Path(folder) for folder in values.strings("media.folders")),
        image_bytes=round(values.float("media.max_image_mb") * MIB),
        video_bytes=round(values.float("media.max_video_mb") * MIB),
        frames=values.int("media.max_frames"),
        fetch_seconds=values.float("media.fetch_timeout_s"),
    )


def access_settings(values: OptionValues) -> AccessSettings:
    """Return the settings of API keys, rate limits and concurrency."""
    keys_file = values.str("safeguards.api_keys_file")
    return AccessSettings(
        keys_file=Path(keys_file) if keys_file else None,
        rates=RateLimits(
            limits=_limits(values),
            user_header=values.str(f"{_RATE}.user_header").lower(),
            redis_url=values.str(f"{_RATE}.redis_url"),
            trusted_proxies=values.strings(f"{_RATE}.trusted_proxies"),
        ),
        concurrency=_concurrency(values),
    )


def _concurrency(values: OptionValues) -> Concurrency:
    maximum = values.int("safeguards.concurrency.max_in_flight")
    # Only if requests are counted: otherwise a timeout, which every server has, would make every server count.
    return Concurrency(maximum, values.float("performance.inference_timeout_s") if maximum else 0.0)


def traffic_settings(values: OptionValues) -> TrafficSettings:
    """Return the traffic splits."""
    tree: Mapping[str, Any] = values.get("traffic") or {}
    return TrafficSettings({model: traffic_split(model, split) for model, split in tree.items()})


def _limits(values: OptionValues) -> tuple[RateLimit, ...]:
    enabled = values.get(f"{_RATE}.enabled")
    rows = values.get(f"{_RATE}.limits") or ()
    per_minute = values.get(f"{_RATE}.requests_per_minute")
    if enabled is False or not (enabled or rows or per_minute):
        return ()
    if per_minute is None:
        per_minute = 0 if rows else DEFAULT_RATE
    more = tuple(RateLimit(row["requests"], row["seconds"], row["by"], row["burst"]) for row in rows)
    if not per_minute:
        return more
    subject, burst = values.get(f"{_RATE}.by"), values.int(f"{_RATE}.burst")
    return (RateLimit(per_minute, 60.0, subject, burst), *more)


Download = Callable[[HubLocation], Path]


def single_models(values: OptionValues, split_models: Mapping[str, Any], download: Download) -> tuple[SingleModel, ...]:
    """Return the models that are served from their paths: that of `model.path`, and others of the command line."""
    first = single_model(values, split_models, download)
    if first is None:
        return ()
    models = [first]
    for key in ("model.name", "model.version", "model.inputs", "model.outputs"):
        if values.more_models and values.has(key):
            raise values.error(key, "is for one model, and several are served: leave it out, or serve a repository")
    for text in values.more_models:
        path, name, fetched = _locate(values, text, download)
        if name in (model.name for model in models):
            raise InvalidArgument(f"two models are named {name!a}, the second is {text!a}: rename its file or folder")
        all_versions = first.all_versions or name in split_models
        models.append(replace(first, path=path, name=name, all_versions=all_versions, fetched=fetched))
    return tuple(models)


def single_model(
    values: OptionValues, split_models: Mapping[str, Any], download: Download | None = None
) -> SingleModel | None:
    """Return the settings of `model`; None without `model.path`. Without `download`, it must be on this machine."""
    written = values.str("model.path")
    if not written:
        _reject_model_options(values)
        return None
    path, name, fetched = _locate(values, written, download)
    name = values.str("model.name") or name
    if not is_name(name):
        raise values.error("model.name", f"{name[:64]!a} is not a model name: use letters, digits, '_', '.', '-'")
    gpu, auto = _device(values)
    return SingleModel(
        path,
        name,
        values.str("model.version") or LATEST,
        values.bool("model.serve_all_versions") or name in split_models,
        gpu,
        auto,
        values.int("performance.instances") if values.has("performance.instances") else None,
        values.str("model.precision") or "fp32",
        values.get("performance.max_batch_size"),
        values.float("performance.batch_timeout_ms") if values.has("performance.batch_timeout_ms") else None,
        values.float("performance.queue_timeout_ms"),
        values.int("performance.max_queue_size"),
        values.bool("cache.enabled"),
        values.get("model.inputs") or (),
        values.get("model.outputs") or (),
        _parameters(values),
        fetched,
    )


def _locate(values: OptionValues, written: str, download: Download | None) -> tuple[Path, str, bool]:
    """Return the path of a model on this machine, the name that follows from it, and whether it was downloaded."""
    path = Path(os.path.abspath(os.path.expanduser(written)))  # Links are followed at each poll.
    if path.exists():
        return path, model_name(path), False
    is_hub_url = scheme_of(written) in HUB_SCHEMES
    # A name below a folder of this machine is a path that does not exist, not a model of the hub.
    if download is None or not (is_hub_url or (is_hub_name(written) and not path.parent.exists())):
        raise values.error("model.path", f"{written!a} does not exist (looked for {str(path)!a}): name a model")
    location = parse_location(written) if is_hub_url else HubLocation(written)
    if not isinstance(location, HubLocation):
        raise values.error(
            "model.path", f"{written!a} is not a model of the Hugging Face Hub: use hf://organisation/name"
        )
    return download(location), model_name(Path(location.repository)), True


def _device(values: OptionValues) -> tuple[int | None, bool]:
    """Return the GPU, and whether the server may choose."""
    device = values.str("model.device") or "auto"
    if device == "auto":
        return None, True
    if device == "cpu":
        return None, False
    number = device.partition(":")[2]
    gpus = visible_gpus()
    if not gpus:
        raise values.error(
            "model.device",
            f"{device} asks for a GPU, and this process sees none: write device: cpu, or device: auto to use a GPU only "
            "where there is one; in a container, give it the GPU (docker run --gpus all)",
        )
    if number and int(number) >= gpus:
        raise values.error("model.device", f"{device} is not there: the GPUs are cuda:0 to cuda:{gpus - 1}")
    return int(number) if number else -1, False


def _parameters(values: OptionValues) -> dict[str, str]:
    parameters = {}
    for name, value in (values.get("model.parameters") or {}).items():
        if not isinstance(value, str | int | float):
            raise values.error("model.parameters", f"{name[:64]!a} takes a text or a number")
        parameters[name] = str(value).lower() if isinstance(value, bool) else str(value)
    if values.has("model.tensor_parallel"):
        parameters["tensor_parallel"] = str(values.int("model.tensor_parallel"))
    return parameters


def _reject_model_options(values: OptionValues) -> None:
    """Refuse settings of `model` without `model.path`; for environment variables only warn."""
    for key, setting in values.settings.items():
        if not (key.startswith("model.") or key in _MODEL_KEYS) or not values.has(key):
            continue
        problem = "is for the model at model.path, which is not given: add it"
        if setting.origin.kind == "env":
            log.warning("%s %s", setting.origin.name, problem)
        elif setting.value not in (None, (), {}, False):
            raise values.error(key, f"{problem}, or say it in the configurations of the models")
