# SPDX-License-Identifier: Apache-2.0
"""From the options about models to the engine's settings. What does not go together is refused here, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import InvalidArgument
from headrace.engine.engine import EngineSettings
from headrace.engine.repository.settings import Mode, RepositorySettings


def engine_settings(
    folders: Sequence[str],
    *,
    mode: str,
    poll_seconds: float,
    load_models: Sequence[str],
    strict_model_config: bool,
    strict_readiness: bool,
    exit_on_error: bool,
    load_threads: int,
    cache_bytes: int,
    resources: Sequence[str],
    processes: int,
) -> EngineSettings:
    """The engine that the options ask for."""
    chosen = mode_of(mode)
    if chosen == "explicit" and not folders:
        raise InvalidArgument("--model-control-mode=explicit needs a folder of models: headrace serve MODELS ...")
    if chosen == "explicit" and processes > 1:
        raise InvalidArgument(
            "--model-control-mode=explicit goes with one process: with --processes, each process would have its own "
            "set of models. Use poll, or one process"
        )
    if load_models and chosen != "explicit":
        raise InvalidArgument("--load-model chooses what explicit loads: add --model-control-mode=explicit")
    if chosen == "poll" and poll_seconds == 0:
        chosen = "none"
    repository = RepositorySettings(
        mode=chosen,
        load_models=tuple(load_models),
        poll_seconds=poll_seconds or RepositorySettings().poll_seconds,
        exit_on_error=exit_on_error,
        model_load_thread_count=load_threads,
        strict_model_config=strict_model_config,
    )
    return EngineSettings(
        repositories=tuple(folders),
        repository=repository,
        strict_readiness=strict_readiness,
        cache_bytes=cache_bytes,
        rate_limit_resources=dict(resource_of(text) for text in resources),
    )


def mode_of(text: str) -> Mode:
    """One of the modes."""
    known: dict[str, Mode] = {"none": "none", "poll": "poll", "explicit": "explicit"}
    if text not in known:
        raise InvalidArgument(f"--model-control-mode is none, poll or explicit, not {text!r}")
    return known[text]


def resource_of(text: str) -> tuple[str, int]:
    """Read `NAME:COUNT`."""
    name, _, count = text.rpartition(":")
    if not name or not (count.isascii() and count.isdigit()) or len(count) > 9 or int(count) < 1 or ":" in name:
        raise InvalidArgument(f"--rate-limit-resource is NAME:COUNT, such as memory:4, not {text!r}")
    return name, int(count)
