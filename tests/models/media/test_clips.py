# SPDX-License-Identifier: Apache-2.0
"""Videos: the frames that are chosen, and the bounds on what is decoded."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from media_files import sound, video

from headrace.core.errors import Cancelled, InvalidArgument
from headrace.core.generation import PromptVideo
from headrace.models.media.decoding import MATROSKA, MP4, VideoLimits, decode_video, sniff

LIMITS = VideoLimits(
    fps=5, max_frames=100, frame_pixels=10_000, clip_pixels=1_000_000, video_seconds=60, decode_seconds=20
)


def decoded(content: bytes, limits: VideoLimits = LIMITS, cancelled: Callable[[], bool] = lambda: False) -> PromptVideo:
    result = sniff(content[:64])
    assert result is not None
    return decode_video(io.BytesIO(content), result, limits, cancelled)


def brightness(clip: PromptVideo) -> list[int]:
    return [round(float(frame.mean()) / 10) for frame in clip.frames]


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
    ],
)
def test_every_format_is_sampled_at_the_wanted_rate(format: str, codec: str) -> None:
    clip = decoded(video(format, codec))
    assert clip.frames.shape == (10, 16, 32, 3)
    assert clip.seconds == pytest.approx([0.2 * index for index in range(10)], abs=0.01)
    assert clip.frames_per_second == pytest.approx(5, abs=0.1)
    assert np.abs(np.array(brightness(clip)) - np.arange(0, 20, 2)).max() <= 1


def test_no_more_frames_than_there_are() -> None:
    clip = decoded(video(frames=5), replace(LIMITS, fps=100))
    assert len(clip.frames) == 5
    assert clip.frames_per_second == pytest.approx(10)


def test_one_frame_is_a_clip() -> None:
    assert decoded(video(frames=1)).frames.shape == (1, 16, 32, 3)


def test_too_many_frames_are_spread_over_the_video() -> None:
    clip = decoded(video(frames=24), replace(LIMITS, fps=10, max_frames=6))
    assert brightness(clip) == [0, 4, 8, 12, 16, 20]


def test_large_frames_are_fewer() -> None:
    assert len(decoded(video(), replace(LIMITS, clip_pixels=32 * 16 * 4)).frames) == 4
    with pytest.raises(InvalidArgument, match="pixels"):
        decoded(video(), replace(LIMITS, clip_pixels=32 * 16 - 1))
    with pytest.raises(InvalidArgument, match="511 are the most"):
        decoded(video(), replace(LIMITS, frame_pixels=32 * 16 - 1))


@pytest.mark.parametrize("said", [0, 1, 400, 0xFFFFFFFF])
def test_a_false_length_is_harmless(said: int) -> None:
    content = with_duration(video(frames=24), said)
    clip = decoded(content, replace(LIMITS, fps=10, max_frames=6))
    assert 1 <= len(clip.frames) <= 6
    if said in (0, 1, 400):
        # As if it had said nothing: every frame came by, and what was kept lies evenly over all of them.
        assert brightness(clip)[-1] >= 16
        assert len(set(np.diff(brightness(clip)))) == 1


def with_duration(content: bytes, duration: int) -> bytes:
    """The same MP4, whose headers all tell another length."""
    changed = bytearray(content)
    for box, offset in ((b"mvhd", 16), (b"tkhd", 20), (b"mdhd", 16)):
        at = content.index(box) + 4
        struct.pack_into(">I", changed, at + offset, duration)
    return bytes(changed)


def test_a_phone_held_upright() -> None:
    content = bytearray(video())
    matrix = content.index(b"tkhd") + 4 + 40
    one = 1 << 16
    struct.pack_into(">9i", content, matrix, 0, one, 0, -one, 0, 0, 16 << 16, 0, 1 << 30)
    assert decoded(bytes(content)).frames.shape == (10, 32, 16, 3)


def test_a_longer_clip_than_allowed_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="longer than 1 seconds"):
        decoded(video(frames=20), replace(LIMITS, video_seconds=1))


def test_decoding_has_a_time() -> None:
    with pytest.raises(InvalidArgument, match="more than 1e-06 s|damaged"):
        decoded(video(frames=20), replace(LIMITS, decode_seconds=1e-6))


def test_it_can_be_cancelled() -> None:
    with pytest.raises(Cancelled):
        decoded(video(), cancelled=lambda: True)


@pytest.mark.parametrize("part", [0.3, 0.7])
def test_a_cut_off_video_is_an_error(part: float) -> None:
    content = video()
    with pytest.raises(InvalidArgument, match="cut off"):
        decoded(content[: int(len(content) * part)])


def test_sound_alone_is_not_a_video() -> None:
    with pytest.raises(InvalidArgument, match="no picture"):
        decoded(sound())


def test_other_codecs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="codec is not decoded"):
        decoded(video("matroska", "ffv1"))


@pytest.mark.parametrize("format", [MP4, MATROSKA])
def test_a_playlist_is_never_followed(format: object, tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").write_bytes(video())
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{tmp_path}/secret.mp4\n#EXT-X-ENDLIST\n".encode()
    assert sniff(playlist) is None
    with pytest.raises(InvalidArgument, match="damaged"):
        decode_video(io.BytesIO(playlist), format, LIMITS, lambda: False)  # type: ignore[arg-type]


def test_bytes_at_random_do_no_harm() -> None:
    random = np.random.default_rng(7)
    for kind, codec in (("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")):
        whole = video(kind, codec, frames=5)
        for _ in range(25):
            content = bytearray(whole)
            for place in random.integers(16, len(content), 6):
                content[place] = int(random.integers(0, 256))
            try:
                assert decoded(bytes(content)).frames.ndim == 4
            except InvalidArgument:
                pass
