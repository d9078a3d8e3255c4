# SPDX-License-Identifier: Apache-2.0
"""`MediaReader`: read images and videos from URLs into pixels.

Reads `data:` and http(s) URLs, object stores if there are credentials, and files in folders that the operator allows.
Fetching and decoding happen in threads; downloaded files are removed before the caller gets its pixels or its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from headrace.core.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.core.generation import PromptImage, PromptVideo
from headrace.models.media.decoding import (
    HEAD_BYTES,
    IMAGES,
    VIDEOS,
    Format,
    Kind,
    VideoLimits,
    decode_content,
    decode_image,
    decode_video,
    parse_data_url,
    sniff,
)
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.http_download import fetch
from headrace.models.storage.locations import (
    CLOUD_SCHEMES,
    WEB_SCHEMES,
    LocalLocation,
    ObjectLocation,
    parse_location,
    public_text,
    scheme_of,
)
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

log = logging.getLogger("headrace.media")

T = TypeVar("T")
_POLL_SECONDS = 0.2
_UNSUPPORTED_CLOUDS = ("cs",)


class MediaReader:
    """Reads media within limits. Every problem is an InvalidArgument that says what to do."""

    def __init__(self, settings: MediaSettings, credentials: CloudCredentials | None = None) -> None:
        self._settings = settings
        self._credentials = credentials
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="media")
        self._decoders = threading.BoundedSemaphore(settings.decoders)
        self._in_progress = 0
        self._closed = threading.Event()

    async def picture(self, url: str) -> PromptImage:
        """Read an image."""
        media = await self._run(lambda cancelled: self._read(url, "image", 1.0, None, cancelled))
        if not isinstance(media, PromptImage):
            raise InvalidArgument(f"{_shown(url)} is a video, where an image is expected: {IMAGES}")
        return media

    async def clip(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptVideo:
        """Read frames of a video: `fps` per second, or fewer to stay below `max_frames`."""
        media = await self._run(lambda cancelled: self._read(url, "video", fps, max_frames, cancelled))
        if not isinstance(media, PromptVideo):
            raise InvalidArgument(f"{_shown(url)} is an image, where a video is expected: {VIDEOS}")
        return media

    async def item(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptImage | PromptVideo:
        """Read an image or a video, by its content."""
        return await self._run(lambda cancelled: self._read(url, None, fps, max_frames, cancelled))

    def close(self) -> None:
        """Cancel running reads and refuse new ones."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[Callable[[], bool]], T]) -> T:
        if self._closed.is_set():
            raise _stopping()
        if self._in_progress >= self._settings.threads + self._settings.waiting:
            raise ResourceExhausted("too many images and videos are being read; try again", retry_after_seconds=1.0)
        caller_done = threading.Event()
        self._in_progress += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(
                self._threads, work, lambda: caller_done.is_set() or self._closed.is_set()
            )
            return await future
        except (asyncio.CancelledError, Cancelled):
            # The reader was closed, or the caller was cancelled.
            task = asyncio.current_task()
            if self._closed.is_set() and (task is None or not task.cancelling()):
                raise _stopping() from None
            raise
        finally:
            # The caller was cancelled: the thread notices and cleans up.
            caller_done.set()
            self._in_progress -= 1

    def _read(
        self, url: str, kind: Kind | None, fps: float, max_frames: int | None, cancelled: Callable[[], bool]
    ) -> PromptImage | PromptVideo:
        settings = self._settings
        if not (0 < fps <= 1000):
            raise InvalidArgument(f"fps is {fps:g}; it must be more than 0 and at most 1000")
        frames = settings.frames if max_frames is None else max_frames
        if frames < 1:
            raise InvalidArgument(f"max_frames is {frames}; it must be at least 1")
        limits = VideoLimits(
            fps,
            min(frames, settings.frames),
            settings.image_pixels,
            settings.clip_pixels,
            settings.video_seconds,
            settings.decode_seconds,
        )
        try:
            with self._open(url, kind, cancelled) as file:
                return self._decode(file, url, kind, limits, cancelled)
        except (InvalidArgument, Cancelled):
            raise
        except (NotFound, PermissionDenied, Unavailable, DeadlineExceeded) as error:
            # For the client, an unreachable server and a missing file are both invalid arguments.
            raise InvalidArgument(error.message) from None
        except HeadraceError:
            raise
        except OSError as error:
            log.warning("could not read an image or video: %s", error)
            raise InvalidArgument(f"{_shown(url)} could not be read") from None

    def _decode(
        self, file: IO[bytes], url: str, kind: Kind | None, limits: VideoLimits, cancelled: Callable[[], bool]
    ) -> PromptImage | PromptVideo:
        head = file.read(HEAD_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        media_format = sniff(head)
        if media_format is None:
            expected = {"image": IMAGES, "video": VIDEOS, None: f"{IMAGES}; {VIDEOS}"}[kind]
            raise InvalidArgument(f"the content of {_shown(url)} is none of {expected}, whatever its name or type says")
        if kind is not None and media_format.kind != kind:
            raise _other_kind(url, media_format)
        if media_format.kind == "image" and size > self._settings.image_bytes:
            raise InvalidArgument(
                f"{_shown(url)} has {size} bytes; {self._settings.image_bytes} are the most for an image"
            )
        while not self._decoders.acquire(timeout=_POLL_SECONDS):
            if cancelled():
                raise Cancelled("reading an image or video was cancelled")
        try:
            if media_format.kind == "image":
                return decode_image(file, media_format, self._settings.image_pixels)
            return decode_video(file, media_format, limits, cancelled)
        finally:
            self._decoders.release()

    @contextlib.contextmanager
    def _open(self, url: str, kind: Kind | None, cancelled: Callable[[], bool]) -> Iterator[IO[bytes]]:
        """Fetch a URL into a file; it is removed afterwards unless it is a local file."""
        settings = self._settings
        max_bytes = settings.image_bytes if kind == "image" else settings.video_bytes
        scheme = "data" if url[:5].lower() == "data:" else scheme_of(url)
        if scheme == "data" and scheme in settings.schemes:
            data = parse_data_url(url)
            if kind is not None and data.kind != kind:
                raise InvalidArgument(f"a data: URL of type {data.mime} was sent where {_a(kind)} is expected")
            yield io.BytesIO(decode_content(data, settings.image_bytes if data.kind == "image" else max_bytes))
        elif scheme in WEB_SCHEMES and scheme in settings.schemes:
            with self._folder() as folder:
                fetch(url, folder / "item", settings.fetch_policy(max_bytes), cancelled=cancelled)
                with (folder / "item").open("rb") as file:
                    yield file
        elif scheme in CLOUD_SCHEMES or scheme in _UNSUPPORTED_CLOUDS:
            with self._folder() as folder, self._from_store(url, folder, max_bytes, cancelled).open("rb") as file:
                yield file
        elif scheme in {"", "file"}:
            with _open_local(url, settings.folders, max_bytes) as file:
                yield file
        else:
            schemes = ", ".join(f"{name}:" for name in settings.schemes)
            raise InvalidArgument(f"{scheme}: URLs are not read here; send one of {schemes}")

    def _from_store(self, url: str, folder: Path, max_bytes: int, cancelled: Callable[[], bool]) -> Path:
        if self._credentials is None or scheme_of(url) in _UNSUPPORTED_CLOUDS:
            raise InvalidArgument(
                f"Cloud-storage URIs are not supported by the inference service: {_shown(url)}; "
                "send an http(s):// or data: URL"
            )
        location = parse_location(url)
        if not isinstance(location, ObjectLocation):
            raise InvalidArgument(f"{_shown(url)} is not in an object store")
        settings = self._settings
        limits = ObjectLimits(max_bytes, 1000, settings.idle_seconds, settings.fetch_seconds / 4)
        end = time.monotonic() + settings.fetch_seconds
        source = ObjectSource(location, self._credentials, limits)
        listing = source.read_listing()
        if not listing.is_file:
            raise InvalidArgument(f"{_shown(url)} is a folder of a bucket; name one image or video")
        try:
            source.download(listing, folder, cancelled=lambda: cancelled() or time.monotonic() > end)
        except Cancelled:
            if cancelled():
                raise
            raise InvalidArgument(f"{_shown(url)} took longer than {settings.fetch_seconds:g} seconds") from None
        return folder / listing.objects[0].name

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="headrace-media-", dir=self._settings.temporary_folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _stopping() -> Unavailable:
    return Unavailable("this server is stopping and reads no more images and videos")


def _open_local(url: str, folders: tuple[Path, ...], max_bytes: int) -> IO[bytes]:
    location = parse_location(url)
    if not folders or not isinstance(location, LocalLocation):
        raise InvalidArgument("paths of the server's own disk are not read; send an http(s):// or data: URL")
    # One message for all reasons: do not reveal what exists outside of the folders.
    refusal = InvalidArgument(f"{_shown(url)} is not a file in a folder that this server reads media from")
    path = location.path.resolve()
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise refusal
    try:
        # Do not follow a link that was created meanwhile, and do not wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise refusal from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{_shown(url)} has {status.st_size} bytes; {max_bytes} are the most")
    raise refusal


def _other_kind(url: str, format: Format) -> InvalidArgument:
    expected = "a video" if format.kind == "image" else "an image"
    return InvalidArgument(f"the content of {_shown(url)} is {_a(format.kind)}, where {expected} is expected")


def _a(kind: Kind) -> str:
    return "an image" if kind == "image" else "a video"


def _shown(url: str) -> str:
    """Return a URL for an error message: without its query; of a `data:` URL only the beginning."""
    return url[:40].partition(",")[0] + ",..." if url[:5].lower() == "data:" else public_text(url)
