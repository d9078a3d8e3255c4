# SPDX-License-Identifier: Apache-2.0
"""Whether a model sees, and with which eyes. Called by the `llm` backend when it loads a model, and for its requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.backends.llm.seeing.prepared import Eyes, Medium, SeeingLimits, Text
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import Picture

log = logging.getLogger("headrace.backends.llm")


def sees(config: Any) -> bool:
    """Whether a model's configuration (of transformers) has a part for pictures."""
    return getattr(config, "vision_config", None) is not None


def open_eyes(
    folder: Path, config: Any, text: Text, parameters: Mapping[str, str], *, trust_remote_code: bool = False
) -> Eyes | None:
    """The eyes of a model, None of one that reads text only. Reads the folder's processor."""
    if not sees(config):
        return None
    from transformers import AutoImageProcessor, AutoProcessor

    from headrace.backends.llm.seeing.processor import ProcessorEyes
    from headrace.backends.llm.seeing.qwen import MODEL_TYPES, QwenEyes

    limits = SeeingLimits.of(parameters)
    qwen = config.model_type in MODEL_TYPES
    reader = AutoImageProcessor if qwen else AutoProcessor
    try:
        read = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:
        log.exception("the processor of images in %s could not be read", folder)
        raise FailedPrecondition(
            f"the processor of images in '{folder.name}' could not be read: copy the whole model folder with "
            "preprocessor_config.json; the server's log has the details"
        ) from None
    if qwen:
        return QwenEyes(folder, config, read, text, limits)
    if getattr(read, "image_token", None) is None:
        raise FailedPrecondition(
            f"the processor in '{folder.name}' names no token for images: serve it with another engine through backend "
            "'openai_proxy'"
        )
    return ProcessorEyes(read, text, limits)


def refuse_media(model: str, media: Sequence[Medium]) -> None:
    """For a model without eyes."""
    if media:
        what = "an image" if isinstance(media[0], Picture) else "a video"
        raise InvalidArgument(
            f"'messages' has {what}, and model '{model}' reads text only: send text, or ask a vision-language model"
        )
