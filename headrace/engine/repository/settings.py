# SPDX-License-Identifier: Apache-2.0
"""Settings of a model repository: which models are loaded, when it is polled, and timeouts.

A module of its own, because programs read their settings without importing the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.core.kept_memory import KeptMemory

Mode = Literal["none", "poll", "explicit", "on-demand"]
TrialLoad = Literal["fetched", "always", "never"]

EVERY_MODEL = "*"
"""In `load_models`: all of them."""


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """Settings of one `RepositoryControl`."""

    mode: Mode = "none"
    """`none` loads all models once, `poll` also follows changes of the folders, `explicit` loads on request, `on-demand`
    loads a model at the first request that names it, and follows changes, too."""
    load_models: tuple[str, ...] = ()
    """Models that `explicit` and `on-demand` load at the start; `*` for all (`explicit`)."""
    pinned_models: tuple[str, ...] = ()
    """Models that are loaded at the start and never evicted."""
    host_memory_bytes: int = 0
    """Host memory for models that load on demand; 0: most of what is free at the start."""
    gpu_memory_bytes: int = 0
    """The same on each GPU."""
    wait_seconds: float = 120.0
    """How long a request waits for its model; then it gets 503, and the load goes on."""
    sizes_folder: Path | None = None
    """Where measured sizes of models are remembered; None: in this process only."""
    processes: int = 1
    """Processes that serve these models. With several, none can load on demand: each would count only its own memory."""
    poll_seconds: float = 15.0
    """Time between two scans of the folders; 0: `on-demand` does not scan again."""
    settle_seconds: float = 1.0
    """A changed folder is loaded if nothing was written for this long, or if it is the same in two scans."""
    exit_on_error: bool = True
    """Whether the start fails if a model fails to load."""
    model_load_thread_count: int = 4
    """Maximum number of versions that are loaded at the same time."""
    load_seconds: float = 3600.0
    """Time for loading a version; 0: no limit. A load that takes longer is abandoned, and others may start."""
    trial_load: TrialLoad = "fetched"
    """Which models a child process loads first: those whose files come from elsewhere, all, or none."""
    trial_load_bytes: int = 0
    """Memory that the child process may allocate; 0: nearly all that is free."""
    fetched_repositories: tuple[Path, ...] = ()
    """Repositories whose files come from elsewhere: from a URL, an object store or the Hugging Face Hub."""
    retire_seconds: float = 300.0
    """Time for requests in flight to finish on a version that was replaced or unloaded."""
    unload_wait_seconds: float = 2.0
    """How long `unload` waits for the memory to be free; then it continues in the background."""
    strict_model_config: bool = False
    """Whether configurations must be complete; otherwise missing parts are read from the model's files."""
    gpus: int = 0
    """Number of GPUs of this machine, for completing configurations."""
    kept_memory: KeptMemory | None = None
    """What backends keep of evicted models: it counts, and is freed if memory is short."""
    refresh: Callable[[], None] | None = None
    """Called in a thread before each poll and before each explicit load: updates a folder that mirrors remote storage."""
    stop_refresh: Callable[[], None] | None = None
    """Called on close: stops a running refresh soon."""
