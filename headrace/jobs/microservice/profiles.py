# SPDX-License-Identifier: Apache-2.0
"""Profiles of TAO's architectures: parameters, defaults and media rules of each.

A job with another architecture gets `GENERAL`, which only requires what its model kind requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.jobs.microservice.model_kinds.contract import Parameter, ignored, override

MAX_NEW_TOKENS = 131_072
MAX_PIXELS = 1 << 30

MIME_EXTENSIONS: Mapping[str, str] = {
    "video/mp4": "mp4",
    "video/avi": "avi",
    "video/x-msvideo": "avi",
    "video/webm": "webm",
    "video/mkv": "mkv",
    "video/x-matroska": "mkv",
    "video/mov": "mov",
    "video/quicktime": "mov",
    "image/jpeg": "jpg",
    "image/jpg": "jpg",
    "image/png": "png",
    "image/webp": "webp",
    "image/gif": "gif",
    "image/bmp": "bmp",
    "image/tiff": "tiff",
}
"""File extensions for the MIME types of data: URLs."""

_PROMPT = Parameter("prompt", "text", aliases=("text", "question"))
_MEDIA = Parameter("media", "texts", aliases=("files",))
_SYSTEM = Parameter("system_prompt", "text")
_IGNORED = ignored("conv_mode", "mode", "model", "enable_lora", "base_model_path", "do_sample")
_FPS = Parameter("fps", "number", 4.0, minimum=0.01, maximum=120)
_TOTAL_PIXELS = Parameter("total_pixels", "integer", 6_422_528, minimum=1024, maximum=MAX_PIXELS)
_SAMPLING = (
    Parameter("max_new_tokens", "integer", 512, minimum=1, maximum=MAX_NEW_TOKENS, aliases=("max_tokens",)),
    Parameter("temperature", "number", 0.7, minimum=0, maximum=2),
    Parameter("top_p", "number", 1.0, minimum=0, maximum=1),
    Parameter("top_k", "integer", 0, minimum=0, maximum=1_000_000),
    Parameter("min_p", "number", 0.0, minimum=0, maximum=1),
    Parameter("repetition_penalty", "number", 1.0, minimum=0.01, maximum=10),
    Parameter("frequency_penalty", "number", 0.0, minimum=-2, maximum=2),
    Parameter("presence_penalty", "number", 0.0, minimum=-2, maximum=2),
    Parameter("seed", "integer", minimum=-(2**63), maximum=2**63 - 1),
    Parameter("stop", "texts"),
    Parameter("n", "integer", 1, minimum=1, maximum=16),
    Parameter("ignore_eos", "truth", False),
    Parameter("min_tokens", "integer", 0, minimum=0, maximum=MAX_NEW_TOKENS),
    *ignored("best_of", "length_penalty"),
)
_CHAT = (
    Parameter(
        "max_tokens",
        "integer",
        1024,
        minimum=1,
        maximum=MAX_NEW_TOKENS,
        aliases=("max_new_tokens", "max_completion_tokens"),
    ),
    *override(_SAMPLING[1:], Parameter("top_p", "number", 0.8, minimum=0, maximum=1)),
    _FPS,
    _TOTAL_PIXELS,
    *ignored("model", "user", "metadata", "store", "stream_options", "service_tier"),
    Parameter("stream", "truth", False),
)
_GENERAL_INFERENCE = (
    _PROMPT,
    _SYSTEM,
    _MEDIA,
    Parameter("images", "texts", aliases=("image",)),
    Parameter("videos", "texts", aliases=("video",)),
    _FPS,
    _TOTAL_PIXELS,
    *override(
        _SAMPLING,
        Parameter("top_p", "number", 0.9, minimum=0, maximum=1),
        Parameter("top_k", "integer", 50, minimum=0, maximum=1_000_000),
    ),
    *_IGNORED,
)
_VIDEO = (
    Parameter("guidance", "integer", 7, minimum=0, maximum=7),
    Parameter("num_steps", "integer", 35, minimum=1, maximum=1000),
    Parameter("seed", "integer", 0, minimum=0, maximum=2**63 - 1),
    Parameter("negative_prompt", "text"),
    Parameter("num_output_frames", "integer", 77, minimum=1, maximum=10_000, aliases=("max_tokens",)),
    Parameter("inference_type", "text", choices=("text2world", "image2world", "video2world")),
)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Which images and videos an architecture accepts."""

    images: frozenset[str]
    """Extensions, without the dot."""
    videos: frozenset[str]
    missing: str = ""
    """The error for a request without media; "" if media are optional."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one architecture."""

    name: str
    folder: str
    """Default folder for models and the state file."""
    inference: tuple[Parameter, ...]
    """Parameters of /api/v1/inference, for models that generate."""
    chat: tuple[Parameter, ...]
    """Parameters of /v1/chat/completions, besides `messages`."""
    media: MediaRules
    kinds: tuple[str, ...] = ()
    """The model kinds that it serves; empty for all."""
    counts_files: bool = False
    """Whether results have the fields of the Cosmos server: files and frames instead of images and videos."""


COSMOS_RL = Profile(
    "cosmos-rl",
    "/tmp/cosmos_models",  # noqa: S108  # as TAO's container; its owner is checked before writing
    inference=(
        _MEDIA,
        Parameter("prompt", "text", "Describe this video.", aliases=("text", "question")),
        _SYSTEM,
        _FPS,
        _TOTAL_PIXELS,
        *override(
            _SAMPLING,
            Parameter("max_new_tokens", "integer", 4096, minimum=1, maximum=MAX_NEW_TOKENS, aliases=("max_tokens",)),
            Parameter("temperature", "number", 0.0, minimum=0, maximum=2),
        ),
        *_IGNORED,
    ),
    chat=_CHAT,
    media=MediaRules(
        frozenset({"jpg", "jpeg", "png", "bmp", "tiff"}),
        frozenset({"mp4", "mkv", "webm", "avi", "mov"}),
        "Cosmos requires 'media' parameter",
    ),
    kinds=("vision_language", "language"),
    counts_files=True,
)

_GENERAL_MEDIA = MediaRules(
    frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff"}), frozenset({"mp4", "avi", "webm", "mkv", "mov"})
)

TAO_DATASERVICES = Profile(
    "tao-dataservices",
    "/tmp/hf_models",  # noqa: S108  # as above
    inference=_GENERAL_INFERENCE,
    chat=_CHAT,
    media=_GENERAL_MEDIA,
)

GENERAL = Profile(
    "",
    "/tmp/tao_models",  # noqa: S108  # as above
    inference=_GENERAL_INFERENCE,
    chat=_CHAT,
    media=_GENERAL_MEDIA,
)


COSMOS_PREDICT = Profile(
    "cosmos-predict2.5",
    "/tmp/cosmos_models",  # noqa: S108  # as above
    inference=(_PROMPT, _MEDIA, *_VIDEO, *ignored("model")),
    chat=(*_VIDEO, *ignored("model", "user"), Parameter("stream", "truth", False)),
    media=MediaRules(frozenset({"png", "jpg", "jpeg", "webp"}), frozenset({"mp4"})),
    kinds=("video",),
)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (COSMOS_RL, COSMOS_PREDICT, TAO_DATASERVICES)}


def profile_named(network_arch: str) -> Profile:
    """Return the profile of an architecture, or `GENERAL`."""
    return PROFILES.get(network_arch.lower(), GENERAL)
