# SPDX-License-Identifier: Apache-2.0
"""Settings of a batch job, for `headrace batch` and for the jobs of the API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.files import cache_folder
from headrace.models.storage.credentials import CloudCredentials

_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the items: every `count`-th, from the `number`-th on."""

    number: int = 1
    """From 1."""
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `2/4`; "" for all items."""
        if not text:
            return cls()
        match = _SHARD.fullmatch(text)
        if match is None or int(match[1]) > int(match[2]):
            raise InvalidArgument(f"--shard {text[:32]!a}: write I/N with I from 1 to N, such as 2/4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def size(self, total: int) -> int:
        """Return the number of items in the shard."""
        return max(0, (total - self.number + self.count) // self.count)

    def has(self, index: int) -> bool:
        """Return whether an item is in the shard."""
        return index % self.count == self.number - 1

    def position(self, index: int) -> int:
        """Return the position of an item within the shard."""
        return index // self.count


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """All settings of a batch job."""

    model: str
    """A path, a URL or hf_model://ORG/NAME; with `repository`, the name of a model in it."""
    input: str
    """A folder, or a manifest: .jsonl, .parquet; a path or a URL."""
    output: str
    """A .jsonl or .parquet file: a path or a URL. In a local folder, `results.jsonl`."""
    repository: str = ""
    """A model repository that contains `model`."""
    network_arch: str = ""
    """An architecture that `microservice.profiles` knows; "" for any."""
    task: str = ""
    """The model kind, if the files do not determine it."""
    specs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Specs of the model, as for a microservice: max_batch_size, dtype, parameters."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Default request parameters: prompt, max_new_tokens, top_k. An item overrides them."""

    ordered: bool = False
    """Whether results are written in the order of the items, or as they finish."""
    limit: int | None = None
    """Use only this many items of the input."""
    shard: Shard = Shard()
    max_failures: int | None = None
    """Maximum number of failed items before the job stops; None for no limit."""
    retry_failed: bool = False
    """Retry items that failed in an earlier run."""
    overwrite: bool = False
    """Discard existing results."""

    batch_size: int | None = None
    """Items per request; None for the model's maximum."""
    in_flight: int | None = None
    """Concurrent requests; None for the default of the model kind."""
    checkpoint_seconds: float = 5.0
    """Interval of syncing results to disk against a power cut. A kill loses nothing that was written."""
    grace_seconds: float = 10.0
    """How long items in flight may take when the job is cancelled."""
    folder: Path = field(default_factory=cache_folder)
    """Folder for downloads, and for results until they are uploaded."""
    media_folders: tuple[Path, ...] = ()
    """Folders whose files a manifest may name, besides its own."""
    private_hosts: tuple[str, ...] = ()
    """Private hosts or networks from which media and input may be fetched."""
    credentials: CloudCredentials | None = field(default=None, repr=False)
    """Credentials of a workspace; None for those of the environment."""
