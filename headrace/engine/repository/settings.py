# SPDX-License-Identifier: Apache-2.0
"""How a repository is kept: which models are loaded, when it is looked at, and how long things may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["none", "poll", "explicit"]


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """Settings of one `RepositoryControl`."""

    mode: Mode = "none"
    """`none` loads everything once, `poll` follows the folders, `explicit` loads what it is asked to."""
    load_models: tuple[str, ...] = ()
    """What `explicit` loads at the start; `*` is every model."""
    poll_seconds: float = 15.0
    """From one look at the folders to the next."""
    settle_seconds: float = 1.0
    """A changed folder is taken when it has been quiet this long, or looks the same at two looks."""
    exit_on_error: bool = True
    """Whether a model that fails at the start fails the start."""
    model_load_thread_count: int = 4
    """How many versions are loaded at the same time."""
    retire_seconds: float = 300.0
    """What requests in flight have to finish on a version that was replaced or unloaded."""
    unload_wait_seconds: float = 2.0
    """How long `unload` waits for the memory to be free; after that it goes on in the background."""
    strict_model_config: bool = False
    """Whether a configuration must say everything itself; otherwise the model's files are asked for what it leaves out."""
    gpus: int = 0
    """How many GPUs this machine has; configurations are completed with it."""
    refresh: Callable[[], None] | None = None
    """Called in a thread before each look at the folders, by whoever keeps one of them like something else: at each poll,
    and when `explicit` is asked to load."""
    stop_refresh: Callable[[], None] | None = None
    """Called when the control closes: a refresh that is under way should end soon."""
