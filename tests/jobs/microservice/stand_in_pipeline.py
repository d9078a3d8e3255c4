# SPDX-License-Identifier: Apache-2.0
"""A stand-in for cosmos-predict2.5's pipeline: a tiny real MP4 whose colour comes from the prompt. It generates nothing."""

from __future__ import annotations

import io
import threading
import time
import zlib

import av
import numpy as np

from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.pipelines import PipelineSettings, VideoRequest


class StandIn:
    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._busy = threading.Lock()

    def generate(self, request: VideoRequest) -> bytes:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("called twice at once")
        try:
            time.sleep(0.02)
            return self._generate(request)
        finally:
            self._busy.release()

    def _generate(self, request: VideoRequest) -> bytes:
        if request.prompt == "refuse":
            raise InvalidArgument("the guardrails refuse this prompt")
        if request.prompt == "crash":
            raise RuntimeError("a secret of the pipeline")
        if request.prompt == "no video":
            return b"nothing"
        shade = zlib.crc32(repr((request.prompt, request.seed, request.inference_type)).encode()) % 200
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=16)
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            pixels = np.full((32, 32, 3), shade, np.uint8)
            for _ in range(request.num_output_frames):
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        return buffer.getvalue()


def open_pipeline(settings: PipelineSettings) -> StandIn:
    if settings.checkpoint is None and settings.model_key != "base-2b":
        raise InvalidArgument(f"the model {settings.model_key!r} is not registered: use base-2b")
    return StandIn(settings)
