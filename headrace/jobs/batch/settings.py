# SPDX-License-Identifier: Apache-2.0
"""What a job can be told. Made by `headrace batch` and by whoever runs jobs of the API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.models.storage.credentials import CloudCredentials

_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of the items are meant: every `count`-th, from the `number`-th on."""

    number: int = 1
    """From 1."""
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `2/4`; "" for all items."""
        if not text:
            return cls()
        found = _SHARD.fullmatch(text)
        if found is None or int(found[1]) > int(found[2]):
            raise InvalidArgument(f"--shard {text[:32]!a}: write I/N with I from 1 to N, such as 2/4")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def size(self, total: int) -> int:
        """How many of so many items are its own."""
        return max(0, (total - self.number + self.count) // self.count)

    def has(self, index: int) -> bool:
        """Whether an item is."""
        return index % self.count == self.number - 1

    def place(self, index: int) -> int:
        """Where an item of its own stands among them."""
        return index // self.count


def cache_folder() -> Path:
    """Where things lie between two runs when nobody says where."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """All of it."""

    model: str
    """A path, a URL or hf_model://ORG/NAME; with `repository`, a name there."""
    input: str
    """A folder, or a manifest: .jsonl, .parquet; a path or a URL."""
    output: str
    """A file: .jsonl, .parquet; a path or a URL. A local folder gets a file `results.jsonl`."""
    repository: str = ""
    """A folder of models, in which `model` is one."""
    network_arch: str = ""
    """An architecture that `microservice.profiles` knows; "" for any."""
    task: str = ""
    """The kind of model, where its files do not tell."""
    specs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """More about the model, as a job of the microservice has it: max_batch_size, dtype, parameters."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, where the item itself does not say otherwise: prompt, max_new_tokens, top_k."""

    ordered: bool = False
    """Whether results are written in the order of the items; else as they come."""
    limit: int | None = None
    """Only the first so many items of the input."""
    shard: Shard = Shard()
    max_failures: int | None = None
    """More failed items than this stop the job; None for any number."""
    retry_failed: bool = False
    """Compute items again that failed in an earlier run."""
    overwrite: bool = False
    """Begin anew where there are results already."""

    batch_size: int | None = None
    """Items that are sent together; None for the most that the model takes."""
    in_flight: int | None = None
    """Requests under way; None for what suits the kind of model."""
    checkpoint_seconds: float = 5.0
    """From one time that results are made to last a power cut to the next. A kill loses nothing that was written."""
    grace_seconds: float = 10.0
    """For items under way when the job is cancelled."""
    folder: Path = field(default_factory=cache_folder)
    """For downloads, and for the results of jobs that write to a cloud, until they are there."""
    media_folders: tuple[Path, ...] = ()
    """Folders whose files a manifest may name, beside its own."""
    private_hosts: tuple[str, ...] = ()
    """Hosts or networks at private addresses that media and input may come from."""
    credentials: CloudCredentials | None = field(default=None, repr=False)
    """Of a workspace; None for those of the environment."""
