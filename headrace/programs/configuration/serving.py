# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the settings of the rooms that it is for: `/predict`, media, access, traffic.

Called by `headrace serve`, and by `headrace config check` for what does not go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.api.predict.settings import InputChecks, PredictSettings, StreamSettings
from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB
from headrace.engine.traffic.checking import check_split
from headrace.engine.traffic.parsing import parse_split
from headrace.engine.traffic.settings import Split, TrafficSettings
from headrace.models.config.problems import Problem
from headrace.models.media.settings import MediaSettings
from headrace.programs.configuration.merging import Configuration
from headrace.programs.configuration.problems import ENVIRONMENT

DEFAULT_RATE = 1000
"""Requests a minute, where a limit is asked for and no number given."""

_RATE = "safeguards.rate_limit"
_CHECKS = "safeguards.input_validation"


def predict_settings(configuration: Configuration) -> PredictSettings | None:
    """`/predict`; None where it is not to be served."""
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
    """Where images and videos may come from, and how large they may be."""
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
    """Who may ask, and how much."""
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
    # Only where requests are counted: else a timeout that every server has would make every server count.
    return Concurrency(most, configuration.number("performance.inference_timeout_s") if most else 0.0)


def traffic_settings(configuration: Configuration) -> TrafficSettings:
    """How versions share the traffic of their models. Raises for what is no split."""
    tree: Mapping[str, Any] = configuration.get("traffic") or {}
    try:
        splits = {model: _split(model, split) for model, split in tree.items()}
    except InvalidArgument as error:
        raise InvalidArgument(f"{_place(configuration, 'traffic')}: {error.message}") from None
    return TrafficSettings(splits)


def problems_of(configuration: Configuration) -> list[Problem]:
    """What is right by itself and wrong together."""
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


def _split(model: str, tree: object) -> Split:
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
