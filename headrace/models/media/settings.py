# SPDX-License-Identifier: Apache-2.0
"""Settings and limits for reading media."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.core.limits import MIB
from headrace.models.storage.http_download import FetchPolicy


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Limits for images and videos of requests. Each is checked before the memory or time is spent."""

    schemes: tuple[str, ...] = ("data", "http", "https")
    """URL schemes that are read, besides object stores (with credentials) and `folders`."""
    allow_hosts: tuple[str, ...] = ()
    """Allowed hosts, or `*.domain`; () for every host that is not at a private address."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`*.domain`) or networks (10.1.0.0/16) that may be at private addresses."""
    folders: tuple[Path, ...] = ()
    """Local folders whose files a client may name, by path or file://; () for none."""

    image_bytes: int = 20 * MIB
    """Size of one encoded image."""
    video_bytes: int = 512 * MIB
    """Size of one encoded video."""
    image_pixels: int = 64_000_000
    """Width times height of one image or frame; Pillow's own limit is 178 million."""
    clip_pixels: int = 128_000_000
    """All chosen frames of one video, 3 bytes per pixel; fewer frames are chosen if they are large."""
    frames: int = 768
    """Maximum frames of one video."""
    video_seconds: float = 3600.0
    """Maximum length of a video."""

    fetch_seconds: float = 60.0
    """Time limit for fetching a URL."""
    idle_seconds: float = 10.0
    """Time limit without any received byte."""
    decode_seconds: float = 60.0
    """Time limit for decoding one video."""

    threads: int = 16
    """Items read at the same time."""
    decoders: int = 2
    """Items decoded at the same time, which needs CPU."""
    waiting: int = 256
    """Items that may wait for a thread."""
    temporary_folder: Path | None = None
    """Folder for downloaded files; None for the system's temporary folder."""
    ca_file: Path | None = None
    """Certificate authorities to trust instead of the system's."""

    def fetch_policy(self, max_bytes: int) -> FetchPolicy:
        """Return the policy for one download."""
        return FetchPolicy(
            max_bytes=max_bytes,
            total_seconds=self.fetch_seconds,
            idle_seconds=self.idle_seconds,
            allow_hosts=self.allow_hosts,
            private_hosts=self.private_hosts,
            ca_file=self.ca_file,
        )
