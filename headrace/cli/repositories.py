# SPDX-License-Identifier: Apache-2.0
"""Turn the options about models into engine settings; reject options that exclude each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.core.errors import InvalidArgument
from headrace.core.files import cache_folder
from headrace.core.telemetry.progress import Progress, silent
from headrace.engine.engine import EngineSettings
from headrace.engine.repository.settings import EVERY_MODEL, Mode, RepositorySettings, TrialLoad
from headrace.models.staging import Staging
from headrace.models.storage.locations import CLOUD_SCHEMES, ObjectLocation, parse_location, scheme_of
from headrace.models.storage.mirror import Mirror, mirror_folder, mirror_once
from headrace.programs.configuration.resolution import OptionValues

log = logging.getLogger("headrace.cli")

_TRIAL_LOADS: dict[str, TrialLoad] = {"fetched": "fetched", "always": "always", "never": "never"}


def engine_settings(
    values: OptionValues, stagings: Sequence[Staging] = (), progress: Progress = silent
) -> EngineSettings:
    """Return the engine settings of the options. `stagings` are models that are served directly from their paths.

    `progress` receives downloads that happen while the server runs.
    """
    mode = mode_of(values)
    folders, mirrors = mirrored(values.strings("model-repository"), progress)
    load = values.strings("load-model")
    folders = (*folders, *(str(staging.repository) for staging in stagings))
    if mode == "explicit":
        load = (*load, *(staging.name for staging in stagings))
    if mode in ("explicit", "on-demand") and not folders:
        raise InvalidArgument(f"--model-control-mode={mode} needs a folder of models: headrace serve MODELS ...")
    _check_mode_options(values, mode, load)
    seconds = values.float("repository-poll-secs")
    if mode == "poll" and seconds == 0:
        mode = "none"
    if values.str("rate-limit") == "off":
        log.warning(
            "--rate-limit=off has no effect: a model's rate_limiter always applies; remove it from the model's configuration"
        )
    return EngineSettings(
        repositories=folders,
        repository=RepositorySettings(
            mode=mode,
            load_models=load,
            pinned_models=values.strings("pin-model"),
            host_memory_bytes=values.int("host-memory-limit"),
            gpu_memory_bytes=values.int("gpu-memory-limit"),
            wait_seconds=values.float("model-wait-seconds"),
            sizes_folder=Path(values.str("model-sizes-dir") or cache_folder() / "model-sizes"),
            processes=values.int("workers"),
            poll_seconds=seconds if mode == "on-demand" else seconds or RepositorySettings().poll_seconds,
            exit_on_error=values.bool("exit-on-error"),
            model_load_thread_count=values.int("model-load-thread-count"),
            load_seconds=values.float("model-load-timeout"),
            trial_load=_TRIAL_LOADS[values.str("trial-load")],
            trial_load_bytes=values.int("trial-load-bytes"),
            fetched_repositories=(
                *(mirror.folder for mirror in mirrors),
                *(staging.repository for staging in stagings if staging.single.fetched),
            ),
            strict_model_config=values.bool("strict-model-config"),
            refresh=_combine([*(mirror.refresh for mirror in mirrors), *(staging.refresh for staging in stagings)]),
            stop_refresh=_combine([mirror.stop for mirror in mirrors]),
        ),
        strict_readiness=values.bool("strict-readiness"),
        cache_bytes=cache_bytes_of(values),
        cache_ttl_seconds=values.float("cache-ttl-s"),
        rate_limit_resources=dict(resource_of(text) for text in values.strings("rate-limit-resource")),
    )


def _check_mode_options(values: OptionValues, mode: Mode, load: Sequence[str]) -> None:
    """Raise InvalidArgument for options that the model control mode does not use."""
    if values.has("load-model") and mode not in ("explicit", "on-demand"):
        raise InvalidArgument("--load-model chooses what explicit loads: add --model-control-mode=explicit")
    if values.has("pin-model") and mode != "on-demand":
        raise InvalidArgument("--pin-model is for models that load on demand: add --model-control-mode=on-demand")
    if mode == "on-demand" and EVERY_MODEL in (*load, *values.strings("pin-model")):
        raise InvalidArgument("--model-control-mode=on-demand is for more models than fit: name those to load or pin")
    if mode == "on-demand" and values.int("workers") > 1:
        raise InvalidArgument(
            "--model-control-mode=on-demand needs a single process, which counts the memory of all models: leave out "
            "--workers, or start several servers behind `headrace router`"
        )


def mirrored(repositories: Sequence[str], progress: Progress = silent) -> tuple[tuple[str, ...], tuple[Mirror, ...]]:
    """Return the repositories as local folders; mirror those in object stores now, and keep them in sync.

    Credentials come from the environment. Mirrors stay in the user's cache, so that the next start downloads only
    changes.
    """
    folders, mirrors = [], []
    base = cache_folder() / "repositories"
    for text in repositories:
        location = parse_location(text) if scheme_of(text) in CLOUD_SCHEMES else None
        if not isinstance(location, ObjectLocation):
            folders.append(text)
            continue
        mirror = Mirror(location, mirror_folder(base, location), progress=progress)
        mirror_once(location, mirror.folder)
        log.info("Mirrored repository %s to %s.", location, mirror.folder)
        folders.append(str(mirror.folder))
        mirrors.append(mirror)
    return tuple(folders), tuple(mirrors)


def _combine(calls: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    """Return one function that calls all of them in order; None if there are none."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def mode_of(values: OptionValues) -> Mode:
    """Return the model control mode, also from Triton's older switches."""
    known: dict[str, Mode] = {"none": "none", "poll": "poll", "explicit": "explicit", "on-demand": "on-demand"}
    modes = {known[values.str("model-control-mode")]} if values.has("model-control-mode") else set()
    if values.has("allow-model-control") and values.bool("allow-model-control"):
        modes.add("explicit")
    if values.has("allow-poll-model-repository"):
        modes.add("poll" if values.bool("allow-poll-model-repository") else "none")
    if modes == {"none", "explicit"} and not values.has("model-control-mode"):
        return "explicit"  # control without polling: the first releases called this explicit
    if len(modes) > 1:
        raise InvalidArgument(f"the options ask for both {' and '.join(sorted(modes))}: use --model-control-mode alone")
    return modes.pop() if modes else known[values.str("model-control-mode")]


def cache_bytes_of(values: OptionValues) -> int:
    """Return the size of the response cache, also from `--cache-config local,size=BYTES`."""
    size = values.int("response-cache-byte-size")
    for text in values.strings("cache-config"):
        front, _, value = text.partition("=")
        cache, _, setting = front.partition(",")
        if cache != "local":
            log.warning("--cache-config %s has no effect: the only cache is 'local', in the server's memory", text)
        elif setting == "size" and value.isascii() and value.isdigit() and len(value) < 19:
            size = int(value)
        else:
            raise InvalidArgument(f"--cache-config must be local,size=BYTES, not {text!r}")
    return size


def resource_of(text: str) -> tuple[str, int]:
    """Parse `NAME:COUNT`; in Triton's `NAME:COUNT:DEVICE` the count applies to every device."""
    name, _, rest = text.partition(":")
    count, colon, device = rest.partition(":")
    if not name or not _is_count(count) or (colon and not (device.isascii() and device.isdigit())):
        raise InvalidArgument(f"--rate-limit-resource must be NAME:COUNT, such as memory:4, not {text!r}")
    if colon:
        log.warning("--rate-limit-resource %s: the count applies to every device, not only to device %s", text, device)
    return name, int(count)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1
