# SPDX-License-Identifier: Apache-2.0
"""The pure parts: states in every combination of flags, parameters, extensions, preparing pictures, and boxes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument
from headrace.core.generation import PromptImage, PromptVideo
from headrace.jobs.microservice.lifecycle import Flags, Lifecycle, Phase, not_ready, phase_of
from headrace.jobs.microservice.model_kinds.contract import MediaItem, Parameter, ignored, read_parameters
from headrace.jobs.microservice.model_kinds.image_transforms import (
    DetectionLimits,
    ImageInput,
    PreparedImage,
    Preprocessing,
    detr_boxes,
    prepare,
    preprocessing_of,
    suppress,
    yolo_boxes,
)
from headrace.jobs.microservice.model_kinds.media import extension_of, fit_clip, media_type_of, read_media
from headrace.jobs.microservice.profiles import COSMOS_PREDICT, COSMOS_RL, GENERAL, TAO_DATASERVICES, profile_named


def test_every_combination_of_flags_is_one_phase() -> None:
    for initializing, failed, loading, load_failed, loaded in itertools.product((True, False), repeat=5):
        flags = Flags(initializing, "x" if failed else None, loading, "y" if load_failed else None, loaded)
        expected = (
            Phase.INITIALIZING
            if initializing
            else Phase.INITIALIZATION_FAILED
            if failed
            else Phase.LOADING
            if loading
            else Phase.LOAD_FAILED
            if load_failed
            else Phase.READY
            if loaded
            else Phase.NOT_STARTED
        )
        assert phase_of(flags) is expected
        reported = not_ready(flags)
        assert (reported is None) == (expected is Phase.READY)
        if reported is not None:
            assert reported.status_code == (202 if expected in (Phase.INITIALIZING, Phase.LOADING) else 503)
            assert (reported.retry_after_seconds is None) == expected.failed


def test_a_life_has_one_order() -> None:
    life = Lifecycle("t")
    with pytest.raises(RuntimeError):
        life.loading("t")
    life.initialized()
    with pytest.raises(RuntimeError):
        life.initialized()
    life.loading("t")
    life.loaded("t")
    assert (life.phase, life.progress.stage) == (Phase.READY, "ready")
    with pytest.raises(RuntimeError):
        life.load_failed("x", "t")


DECLARED = (
    Parameter("count", "integer", 1, minimum=0, maximum=9, aliases=("number",)),
    Parameter("share", "number", 0.5, minimum=0, maximum=1),
    Parameter("names", "texts"),
    Parameter("word", "text", choices=("a", "b")),
    Parameter("flag", "truth", False),
    *ignored("anything"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(("count", "number", "share", "names", "word", "flag", "anything", "x")), VALUES))
def test_parameters_are_right_or_named(given: dict[str, Any]) -> None:
    refused = ""
    read: dict[str, Any] = {}
    try:
        read = read_parameters(DECLARED, given)
    except InvalidArgument as error:
        refused = error.message
    if refused:
        assert any(f"'{name}'" in refused for name in given)
        return
    assert "x" not in given and set(read) == {"count", "share", "names", "word", "flag"}
    assert type(read["count"]) is int and 0 <= read["count"] <= 9
    assert type(read["share"]) is float and 0 <= read["share"] <= 1
    assert read["names"] is None or all(isinstance(name, str) for name in read["names"])
    assert read["word"] in (None, "a", "b") and type(read["flag"]) is bool


def test_the_profiles_have_the_defaults_of_the_originals() -> None:
    def defaults(parameters: tuple[Parameter, ...], *names: str) -> tuple[Any, ...]:
        by_name = {parameter.name: parameter.default for parameter in parameters}
        return tuple(by_name[name] for name in names)

    cosmos = defaults(COSMOS_RL.inference, "prompt", "fps", "total_pixels", "max_new_tokens")
    assert cosmos == ("Describe this video.", 4, 6_422_528, 4096)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty")
    assert defaults(TAO_DATASERVICES.inference, *names) == (512, 0.7, 0.9, 50, 1)
    assert defaults(COSMOS_RL.chat, "max_tokens", "temperature", "top_p") == (1024, 0.7, 0.8)
    video = defaults(COSMOS_PREDICT.chat, "guidance", "num_steps", "seed", "num_output_frames")
    assert video == (7, 35, 0, 77)
    assert profile_named("Cosmos-RL") is COSMOS_RL and profile_named("classification_pyt") is GENERAL


@pytest.mark.parametrize(
    ("url", "extension"),
    [
        ("https://host/a.JPG?X-Amz-Signature=a.b", "jpg"),
        ("s3://bucket/folder.d/clip.mp4", "mp4"),
        ("https://host/picture?name=a.png", ""),
        ("https://host/a%2Epng", "png"),
        ("data:image/png;base64,AAAA", "png"),
        ("DATA:video/x-matroska;base64,", "mkv"),
        ("plain/path.tiff", "tiff"),
        ("https://host/v1.2.3-release-notes", ""),
    ],
)
def test_extensions_are_those_of_the_path(url: str, extension: str) -> None:
    assert extension_of(url) == extension


def test_each_profile_takes_its_own_media() -> None:
    assert media_type_of(MediaItem("a.webp"), GENERAL.media) == "image"
    for profile, url in (
        (COSMOS_RL, "a.webp"),
        (COSMOS_RL, "a.gif"),
        (COSMOS_PREDICT, "a.mkv"),
        (COSMOS_PREDICT, "a.bmp"),
    ):
        with pytest.raises(InvalidArgument, match="One or more input files have unsupported extensions"):
            media_type_of(MediaItem(url), profile.media)
    with pytest.raises(InvalidArgument, match=r"images\[0\]"):
        media_type_of(MediaItem("a.mp4", "image", "images[0]"), GENERAL.media)
    assert media_type_of(MediaItem("https://host/watch", "video"), GENERAL.media) == "video"


def test_nothing_is_fetched_before_all_is_checked_and_the_bad_one_is_named() -> None:
    class Reader:
        def __init__(self) -> None:
            self.read: list[str] = []

        async def picture(self, url: str) -> PromptImage:
            self.read.append(url)
            if url == "bad.png":
                raise InvalidArgument("no picture")
            return PromptImage(np.zeros((1, 1, 3), np.uint8))

        async def clip(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptVideo:
            raise NotImplementedError

        async def item(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptImage | PromptVideo:
            return await self.picture(url)

        def close(self) -> None:
            pass

    reader = Reader()
    items = [MediaItem("a.png", field="media[0]"), MediaItem("b.exe", field="media[1]")]
    with pytest.raises(InvalidArgument, match=r"media\[1\]"):
        asyncio.run(read_media(reader, items, GENERAL.media))
    assert reader.read == []
    items = [MediaItem("a.png"), MediaItem("bad.png", field="media[1]"), MediaItem("https://host/c")]
    with pytest.raises(InvalidArgument, match=r"media\[1\]: no picture"):
        asyncio.run(read_media(reader, items, GENERAL.media))
    result = asyncio.run(read_media(reader, [items[0], items[2]], GENERAL.media))
    assert len(result) == 2


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40), st.integers(1024, 9000))
def test_a_clip_is_cut_to_its_pixels(count: int, height: int, width: int, most: int) -> None:
    clip = PromptVideo(np.zeros((count, height, width, 3), np.uint8), [0.0] * count, 4.0)
    frames = fit_clip(clip, most).frames
    assert frames.shape[0] == count and np.prod(frames.shape[:3]) <= most
    assert fit_clip(clip, 0) is clip


CHW = ImageInput("x", -1, -1)
MEANS = {"do_rescale": False, "do_normalize": False, "resample": 2}


@pytest.mark.parametrize(
    ("told", "size"),
    [
        ({"size": {"height": 10, "width": 20}}, (10, 20)),
        ({"size": 12}, (12, 12)),
        ({"size": {"shortest_edge": 30}}, (30, 60)),
        ({"size": {"shortest_edge": 30, "longest_edge": 40}}, (20, 40)),
        ({"size": {"shortest_edge": 30}, "do_center_crop": True, "crop_size": {"height": 24, "width": 24}}, (24, 24)),
        ({"size": {"shortest_edge": 30}, "do_center_crop": True, "crop_size": 50}, (50, 50)),
        ({"size": {"shortest_edge": 28}, "crop_pct": 0.875}, (28, 28)),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, 384)),
        ({"do_resize": False}, (40, 80)),
    ],
)
def test_sizes_are_those_of_the_processors(told: dict[str, Any], size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 80, 3), np.uint8)
    how = preprocessing_of({**MEANS, **told}, {}, CHW, is_detector=False)
    placed = prepare(pixels, how, CHW)
    assert placed.array.shape == (3, *size) and placed.size == size and placed.original == (40, 80)


@pytest.mark.parametrize("name", ["ViTImageProcessorPil", "ConvNextImageProcessorPil", "CLIPImageProcessorPil"])
def test_pictures_are_prepared_as_transformers_does(name: str) -> None:
    import transformers

    processor = getattr(transformers, name)()
    pixels = np.random.default_rng(1).integers(0, 255, (300, 401, 3), np.uint8)
    expected = processor(pixels, return_tensors="np")["pixel_values"][0]
    how = preprocessing_of(processor.to_dict(), {}, CHW, is_detector=False)
    created = prepare(pixels, how, CHW).array
    assert created.shape == expected.shape
    assert np.abs(created - expected).max() < 0.02


def test_a_fixed_input_and_the_jobs_specs_count_for_more() -> None:
    fixed = ImageInput("x", 16, 24, channels_first=False, whole_numbers=True)
    pixels = np.full((40, 80, 3), 7, np.uint8)
    placed = prepare(pixels, preprocessing_of({"size": 224}, {}, fixed, is_detector=False), fixed)
    assert placed.array.shape == (16, 24, 3) and placed.array.dtype == np.uint8 and placed.array[0, 0, 0] == 7
    specs = {
        "image_size": [8, 8],
        "image_mean": [0, 0, 0],
        "image_std": 0.5,
        "rescale_factor": 1,
        "resize_mode": "letterbox",
    }
    placed = prepare(pixels, preprocessing_of({"size": 224}, specs, CHW, is_detector=False), CHW)
    assert placed.array.shape == (3, 8, 8)
    assert placed.array[0, 4, 4] == 14 and placed.array[0, 0, 0] == 228
    for wrong in ({"image_size": "large"}, {"image_mean": [1, 2]}, {"resize_mode": "fold"}, {"image_size": 10**9}):
        with pytest.raises(InvalidArgument):
            preprocessing_of({}, wrong, CHW, is_detector=False)


SEEN = PreparedImage(np.zeros(0), (2.0, 2.0), (0.0, 8.0), (64, 64), (24, 32))
ALL = DetectionLimits(0.1, 0.5, 100)


def test_boxes_in_the_format_of_detr() -> None:
    boxes = np.asarray([[0.5, 0.5, 0.25, 0.25], [0.1, 0.5, 0.9, 0.5]], np.float32)
    logits = np.asarray([[9.0, 0, 0], [0, 0, 9.0]], np.float32)
    (found,) = detr_boxes(logits, boxes, 2, SEEN, ALL)
    assert (found.index, round(found.score, 3)) == (0, 1.0)
    assert (found.left, found.top, found.right, found.bottom) == (12, 8, 20, 16)
    separate = detr_boxes(logits, boxes, 3, SEEN, ALL)
    assert [item.index for item in separate] == [0, 2]
    assert detr_boxes(logits, boxes, 2, SEEN, DetectionLimits(0.1, 0.5, 0)) == []
    assert separate[1].left == 0, "cut at the edge of the picture"


def test_boxes_in_both_layouts_of_yolo() -> None:
    rows = np.zeros((10, 7), np.float32)
    rows[3] = (32, 32, 8, 8, 0.5, 0.2, 0.8)
    classes = yolo_boxes(rows.T, 3, SEEN, ALL)
    assert classes == yolo_boxes(rows, 3, SEEN, ALL)
    assert [(class_.index, round(class_.score, 2)) for class_ in classes] == [(2, 0.8)]
    sure = yolo_boxes(rows, 2, SEEN, ALL)
    assert [(item.index, round(item.score, 2)) for item in sure] == [(1, 0.4)]
    shares = rows.copy()
    shares[:, :4] /= 64
    assert [yolo_box.left for yolo_box in yolo_boxes(shares, 3, SEEN, ALL)] == [class_.left for class_ in classes]


@given(
    st.lists(st.tuples(*[st.floats(0, 50, width=32)] * 4, st.floats(0, 1, width=32), st.integers(0, 2)), max_size=12)
)
def test_suppression_keeps_the_surest_of_each_heap(drawn: list[Any]) -> None:
    rows = np.asarray([row[:4] for row in drawn], np.float32).reshape(-1, 4)
    corners = np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:]], -1)
    scores = np.asarray([row[4] for row in drawn], np.float32)
    classes = np.asarray([row[5] for row in drawn], np.int64)
    kept = suppress(corners, scores, classes, 0.5).tolist()
    assert len(set(kept)) == len(kept) and sorted(scores[kept].tolist(), reverse=True) == scores[kept].tolist()
    for left_out in set(range(len(drawn))) - set(kept):
        assert any(
            classes[left_out] == classes[item]
            and scores[item] >= scores[left_out]
            and _overlap(corners, item, left_out) > 0.49
            for item in kept
        )


def _overlap(corners: Any, one: int, other: int) -> float:
    low = np.maximum(corners[one, :2], corners[other, :2])
    high = np.minimum(corners[one, 2:], corners[other, 2:])
    shared = float(np.prod(np.clip(high - low, 0, None)))
    areas = [float(np.prod(corners[item, 2:] - corners[item, :2])) for item in (one, other)]
    return shared / max(sum(areas) - shared, 1e-12)


def test_a_picture_that_is_kept_needs_no_size() -> None:
    kept = Preprocessing("keep", scale=1.0)
    assert prepare(np.zeros((3, 5, 3), np.uint8), kept, CHW).array.shape == (3, 3, 5)
