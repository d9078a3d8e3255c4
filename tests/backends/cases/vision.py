# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's image models, tiny and with random weights: a ResNet, a ViT of one size, a YOLOS and an RT-DETR."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import Arrays, Case
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    ViTConfig,
    ViTForImageClassification,
    YolosConfig,
    YolosForObjectDetection,
)
from transformers.utils import logging as transformers_logging

LABELS = {0: "cat", 1: "dog", 2: "bird", 3: "snake, small"}
NAMED = {"id2label": LABELS, "label2id": {label: number for number, label in LABELS.items()}}


def _resnet() -> Any:
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        downsample_in_first_stage=False,
        **NAMED,
    )
    return ResNetForImageClassification(config)


def _vit() -> Any:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def _yolos() -> Any:
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
        **NAMED,
    )
    return YolosForObjectDetection(config)


def _rt_detr() -> Any:
    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16, 16],
        feat_strides=[8, 16, 32],
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=6,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        num_denoising=0,
        **NAMED,
    )
    return RTDetrForObjectDetection(config)


_MAKERS: dict[str, Callable[[], Any]] = {"resnet": _resnet, "vit": _vit, "yolos": _yolos, "rt_detr": _rt_detr}


@cache
def model_of(kind: str) -> Any:
    """The model itself, as transformers has it."""
    torch.manual_seed(7)
    model = _MAKERS[kind]().eval()
    # Fresh weights are so small that all answers are nearly the same, and batch normalisation has seen nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def save(kind: str, folder: Path) -> None:
    """Write the Hugging Face folder of a tiny model."""
    transformers_logging.disable_progress_bar()
    model_of(kind).save_pretrained(folder)


def write(kind: str, folder: Path, config: str = "") -> None:
    """Write it as a model of a repository."""
    save(kind, folder / "1")
    (folder / "config.pbtxt").write_text(f'backend: "huggingface_vision"\n{config}')


def pixels(rows: int, seed: int, size: int = 32) -> Arrays:
    """Images, normalised already."""
    values = np.random.default_rng(seed).standard_normal((rows, 3, size, size))
    return {"pixel_values": values.astype(np.float32)}


def expected(kind: str, given: Arrays) -> Arrays:
    """What transformers says."""
    with torch.inference_mode():
        reported = model_of(kind)(torch.from_numpy(np.array(given["pixel_values"], order="C")))
    names = ("logits", "pred_boxes") if "pred_boxes" in reported else ("logits",)
    return {name: reported[name].numpy() for name in names}


def _case(kind: str, size: int) -> Case:
    return Case(
        f"huggingface_{kind}",
        lambda folder: write(kind, folder),
        lambda rows, seed: pixels(rows, seed, size),
        lambda given: expected(kind, given),
        "model.safetensors",
        tolerance=1e-3,
        needs_config=False,
    )


CASES = [_case("resnet", 32), _case("vit", 32), _case("yolos", 64)]
