# SPDX-License-Identifier: Apache-2.0
"""The architectures that TAO's launcher and API know by name, and what each takes: parameters, defaults, rules for media.

Read by `launching`, `model_folder` and the `kinds`. A job for another architecture gets `GENERAL`, which asks nothing but
what its kind of model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.jobs.microservice.kinds.parameters import Parameter, changed, ignored

MOST_NEW_TOKENS = 131_072
MOST_PIXELS = 1 << 30

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
"""What a data: URL says it is, as an extension."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Which pictures and videos an architecture takes."""

    images: frozenset[str]
    """Extensions, without the dot."""
    videos: frozenset[str]
    missing: str = ""
    """Why a request without any is refused; "" where it is not."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One architecture."""

    name: str
    folder: str
    """Where models and the state file lie when nobody says."""
    inference: tuple[Parameter, ...]
    """Of /api/v1/inference, for models that generate."""
    chat: tuple[Parameter, ...]
    """Of /v1/chat/completions, beside `messages`."""
    media: MediaRules
    kinds: tuple[str, ...] = ()
    """The kinds of models it serves; none for all."""
    counts_files: bool = False
    """Whether results are those of the Cosmos server, which tell of files and frames and not of tokens."""


_PROMPT = Parameter("prompt", "text", also=("text", "question"))
_MEDIA = Parameter("media", "texts", also=("files",))
_SYSTEM = Parameter("system_prompt", "text")
_IGNORED = ignored("conv_mode", "mode", "model", "enable_lora", "base_model_path", "do_sample")
_FPS = Parameter("fps", "number", 4.0, least=0.01, most=120)
_TOTAL_PIXELS = Parameter("total_pixels", "integer", 6_422_528, least=1024, most=MOST_PIXELS)

_SAMPLING = (
    Parameter("max_new_tokens", "integer", 512, least=1, most=MOST_NEW_TOKENS, also=("max_tokens",)),
    Parameter("temperature", "number", 0.7, least=0, most=2),
    Parameter("top_p", "number", 1.0, least=0, most=1),
    Parameter("top_k", "integer", 0, least=0, most=1_000_000),
    Parameter("min_p", "number", 0.0, least=0, most=1),
    Parameter("repetition_penalty", "number", 1.0, least=0.01, most=10),
    Parameter("frequency_penalty", "number", 0.0, least=-2, most=2),
    Parameter("presence_penalty", "number", 0.0, least=-2, most=2),
    Parameter("seed", "integer", least=-(2**63), most=2**63 - 1),
    Parameter("stop", "texts"),
    Parameter("n", "integer", 1, least=1, most=16),
    Parameter("ignore_eos", "truth", False),
    Parameter("min_tokens", "integer", 0, least=0, most=MOST_NEW_TOKENS),
    *ignored("best_of", "length_penalty"),
)

_CHAT = (
    Parameter(
        "max_tokens", "integer", 1024, least=1, most=MOST_NEW_TOKENS, also=("max_new_tokens", "max_completion_tokens")
    ),
    *changed(_SAMPLING[1:], Parameter("top_p", "number", 0.8, least=0, most=1)),
    _FPS,
    _TOTAL_PIXELS,
    *ignored("model", "user", "metadata", "store", "stream_options", "service_tier"),
    Parameter("stream", "truth", False),
)

COSMOS_RL = Profile(
    "cosmos-rl",
    "/tmp/cosmos_models",  # noqa: S108  # as the original; its owner is checked before anything is written there
    inference=(
        _MEDIA,
        Parameter("prompt", "text", "Describe this video.", also=("text", "question")),
        _SYSTEM,
        _FPS,
        _TOTAL_PIXELS,
        *changed(
            _SAMPLING,
            Parameter("max_new_tokens", "integer", 4096, least=1, most=MOST_NEW_TOKENS, also=("max_tokens",)),
            Parameter("temperature", "number", 0.0, least=0, most=2),
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

_GENERAL_INFERENCE = (
    _PROMPT,
    _SYSTEM,
    _MEDIA,
    Parameter("images", "texts", also=("image",)),
    Parameter("videos", "texts", also=("video",)),
    _FPS,
    _TOTAL_PIXELS,
    *changed(
        _SAMPLING,
        Parameter("top_p", "number", 0.9, least=0, most=1),
        Parameter("top_k", "integer", 50, least=0, most=1_000_000),
    ),
    *_IGNORED,
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

_VIDEO = (
    Parameter("guidance", "integer", 7, least=0, most=7),
    Parameter("num_steps", "integer", 35, least=1, most=1000),
    Parameter("seed", "integer", 0, least=0, most=2**63 - 1),
    Parameter("negative_prompt", "text"),
    Parameter("num_output_frames", "integer", 77, least=1, most=10_000, also=("max_tokens",)),
    Parameter("inference_type", "text", choices=("text2world", "image2world", "video2world")),
)

COSMOS_PREDICT = Profile(
    "cosmos-predict2.5",
    "/tmp/cosmos_models",  # noqa: S108  # as above
    inference=(_PROMPT, _MEDIA, *_VIDEO, *ignored("model")),
    chat=(*_VIDEO, *ignored("model", "user"), Parameter("stream", "truth", False)),
    media=MediaRules(frozenset({"png", "jpg", "jpeg", "webp"}), frozenset({"mp4"})),
    kinds=("video",),
)

PROFILES: Mapping[str, Profile] = {each.name: each for each in (COSMOS_RL, COSMOS_PREDICT, TAO_DATASERVICES)}


def profile_named(network_arch: str) -> Profile:
    """The architecture's profile, or the general one."""
    return PROFILES.get(network_arch.lower(), GENERAL)
