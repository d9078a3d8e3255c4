# SPDX-License-Identifier: Apache-2.0
"""Which GPUs of this machine a service gets, by CUDA_VISIBLE_DEVICES. Used by `process`; loads no driver library.

Whose a GPU is, the records of the services say. They are read and written under one lock, so that two starts at the same
moment do not choose the same GPU.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ResourceExhausted

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia[0-9]+")


def gpus_here(environ: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """The GPUs that services may have, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    try:
        count = sum(1 for name in os.listdir(devices) if _DEVICE.fullmatch(name))
    except OSError:
        return ()
    if VARIABLE not in environ:
        return tuple(str(index) for index in range(count))
    named: list[str] = []
    for entry in environ[VARIABLE].split(","):
        text = entry.strip()
        # CUDA stops at the first entry it does not know; -1 is the usual way to write "none".
        if not text or text.startswith("-"):
            break
        named.append(text)
    return tuple(named[:count])


def choose(here: Collection[str], taken: Collection[str], wanted: int) -> tuple[str, ...]:
    """The first `wanted` that are free. Raises ResourceExhausted where there are too few."""
    free = [gpu for gpu in here if gpu not in taken]
    if len(free) < wanted:
        raise ResourceExhausted(
            f"the service needs {wanted} GPU(s), and of {len(here)} here {len(free)} are free: stop a service, or ask for "
            "fewer"
        )
    return tuple(free[:wanted])


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """One at a time chooses, among threads and processes."""
    lock = os.open(root / "gpus.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
