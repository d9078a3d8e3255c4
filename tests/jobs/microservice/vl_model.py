# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2-VL with random weights, as a Hugging Face folder; and a tiny video."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from support import llm_models
from support.llm_models import tiny_tokenizer
from support.model_cache import copy_of

_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'text' -%}{{ item['text'] }}"
    "{%- else -%}<|vision_start|><|{{ item['type'] }}_pad|><|vision_end|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>{%- endfor -%}<|assistant|>"
)


def tiny_qwen_vl(folder: Path, *, brief: bool = False) -> Path:
    """Patches of 4 x 4, two layers of 64. A brief one ends its answers after a few tokens: every other token is an end."""
    return copy_of(folder, _write_qwen_vl, brief, sources=(Path(llm_models.__file__),))


def _write_qwen_vl(folder: Path, brief: bool) -> None:
    import torch
    import transformers

    text: dict[str, Any] = {
        "vocab_size": 520,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    sight = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    sight |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    ids = {"vision_start_token_id": 512, "vision_end_token_id": 513, "image_token_id": 514, "video_token_id": 515}
    torch.manual_seed(3)
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=sight, tie_word_embeddings=False, **ids)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=list(range(1, 512, 2)) if brief else 1, pad_token_id=2
    )
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=2048
    ).save_pretrained(folder)


def mp4(frames: int = 16, fps: int = 8, size: int = 32) -> bytes:
    """A real one, encoded with PyAV."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            pixels = np.full((size, size, 3), number * 255 // frames, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()
