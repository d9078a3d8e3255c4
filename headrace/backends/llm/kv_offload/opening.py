# SPDX-License-Identifier: Apache-2.0
"""Open the KV offload of an instance, as its settings say, and fingerprint what its pages on disk depend on."""

from __future__ import annotations

import hashlib
import logging

from headrace.backends.llm.kv_offload.disk_pages import DiskPages
from headrace.backends.llm.kv_offload.host_pages import HostPages
from headrace.backends.llm.kv_offload.offload import KVOffload
from headrace.backends.llm.kv_offload.page_copier import PageCopier
from headrace.backends.llm.kv_transfer.page_layout import bytes_per_page, pages_fingerprint
from headrace.backends.llm.model_runner.kv_cache import KVCache
from headrace.backends.llm.scheduler import Scheduler
from headrace.backends.llm.settings import LlmSettings
from headrace.core.errors import FailedPrecondition
from headrace.version import __version__

log = logging.getLogger("headrace.backends.llm")


def open_offload(
    settings: LlmSettings, cache: KVCache, scheduler: Scheduler, weights: bytes | None, log_name: str
) -> KVOffload:
    """Take the memory and open the folder. `weights`: their fingerprint. Raises FailedPrecondition."""
    page_bytes = bytes_per_page(cache)
    if settings.kv_host_bytes < page_bytes:
        raise FailedPrecondition(
            f"parameter kv_host_bytes is {settings.kv_host_bytes}, and a page takes {page_bytes} bytes: set it higher"
        )
    try:
        host = HostPages(settings.kv_host_bytes, page_bytes, pinned=cache.device.type == "cuda")
    except (RuntimeError, MemoryError):
        raise FailedPrecondition(
            f"parameter kv_host_bytes is {settings.kv_host_bytes}, and the machine does not have so much memory to give: "
            "set it lower"
        ) from None
    disk = None
    if settings.kv_disk_path is not None and weights is not None:
        fingerprint = _disk_fingerprint(settings, cache, weights)
        disk = DiskPages(settings.kv_disk_path, fingerprint, page_bytes, settings.kv_disk_bytes)
    log.info(
        "%s: %d tokens (%.1f GiB) of evicted KV pages are kept in host memory%s.",
        log_name,
        host.slots * cache.page_size,
        host.slots * page_bytes / 2**30,
        "" if disk is None else f", and {settings.kv_disk_bytes / 2**30:.1f} GiB in {settings.kv_disk_path}",
    )
    copier = PageCopier(cache, page_bytes)
    return KVOffload(scheduler.pool, host, copier, disk, least_tokens=settings.kv_host_min_tokens)


def _disk_fingerprint(settings: LlmSettings, cache: KVCache, weights: bytes) -> bytes:
    """Return what pages on disk must have in common with this instance: all that decides what a page contains."""
    fingerprint = hashlib.blake2b(f"{pages_fingerprint(weights, cache)} {__version__}\n".encode(), digest_size=16)
    # Positions, for example, are scaled as it says.
    fingerprint.update((settings.model_path / "config.json").read_bytes())
    return fingerprint.digest()
