# SPDX-License-Identifier: Apache-2.0
"""What the reader of media can be told. Filled from the configuration, read by the rest of this room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.core.limits import MIB
from headrace.models.storage.fetching import FetchPolicy


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Bounds on images and videos that clients send or name. Each holds before the memory or time it guards is spent."""

    schemes: tuple[str, ...] = ("data", "http", "https")
    """Which URLs are read, besides those of object stores (where there are credentials) and of `folders`."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts, or `*.domain` for all below one; () for every host that is not at a private address."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`*.domain`), or networks (10.1.0.0/16), that may be at private addresses: the operator's own servers."""
    folders: tuple[Path, ...] = ()
    """Folders of this machine whose files a client may name, by path or file://; () for none."""

    image_bytes: int = 20 * MIB
    """One image, encoded."""
    video_bytes: int = 512 * MIB
    """One video, encoded."""
    image_pixels: int = 64_000_000
    """Width times height of one image or frame; Pillow itself stops at 178 million."""
    clip_pixels: int = 128_000_000
    """All chosen frames of one video together, 3 bytes each; fewer frames are chosen where they are large."""
    frames: int = 768
    """Frames chosen from one video."""
    video_seconds: float = 3600.0
    """The longest video."""

    fetch_seconds: float = 60.0
    """From the first look at a URL to its last byte."""
    idle_seconds: float = 10.0
    """The longest silence of a server while we fetch."""
    decode_seconds: float = 60.0
    """Spent on the frames of one video."""

    threads: int = 16
    """Items read at once."""
    decoders: int = 2
    """Of these, decoded at once: the work of the CPU."""
    waiting: int = 256
    """Items that may wait for a thread."""
    temporary_folder: Path | None = None
    """Where fetched files lie until they are decoded; None for the system's."""
    ca_file: Path | None = None
    """Authorities whose certificates are believed, instead of the system's."""

    def fetch_policy(self, max_bytes: int) -> FetchPolicy:
        """How one item may be fetched."""
        return FetchPolicy(
            max_bytes=max_bytes,
            total_seconds=self.fetch_seconds,
            idle_seconds=self.idle_seconds,
            allow_hosts=self.allow_hosts,
            private_hosts=self.private_hosts,
            ca_file=self.ca_file,
        )
