# SPDX-License-Identifier: Apache-2.0
"""Download models of the Hugging Face Hub, or of the mirror in `HF_ENDPOINT`.

A revision is resolved to a commit first, and every file is taken from that commit. By default only safetensors, JSON
and tokenizer files are downloaded: no pickles and no code.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import (
    Cancelled,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from headrace.core.extras import MissingExtra
from headrace.core.privacy import refuse_telemetry
from headrace.models.storage.checksums import from_hex
from headrace.models.storage.errors import DataDamaged, DiskFull
from headrace.models.storage.http_download import never_cancelled
from headrace.models.storage.locations import HubLocation, public_text
from headrace.models.storage.object_stores import ignore_progress
from headrace.models.storage.parallel import Stopped, run_parallel

log = logging.getLogger("headrace.storage")

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files to download: weights, configurations, tokenizers, chat templates."""
_WEIGHTS = ".safetensors"
_TRIES = 3
T = TypeVar("T")
_AT_ONCE = 4
_LOOK_SECONDS = 30.0


class _Cut(Unavailable):
    """Raised when an established connection is lost."""


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a model at one commit."""

    commit: str
    files: tuple[tuple[str, int], ...]
    """Names and sizes."""
    hashes: tuple[tuple[str, str], ...] = ()
    """Names and SHA-256 of large files, for which the Hub has one."""

    @property
    def size(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self.files)


class HubSource:
    """One model of the Hub."""

    def __init__(
        self, place: HubLocation, token: str = "", max_bytes: int | None = None, files: tuple[str, ...] = FILES
    ) -> None:
        self._place = place
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._token = token or os.environ.get("HF_TOKEN") or None
        self._max_bytes = max_bytes
        self._patterns = files
        self._size: int | None = None
        refuse_telemetry()

    def read_listing(self) -> HubListing:
        """List the files to download. Raises NotFound, PermissionDenied or Unavailable with a hint."""
        place = self._place
        info = self._persistently(self._info)
        files = [(str(entry.rfilename), int(entry.size or 0)) for entry in info.siblings or ()]
        chosen = [entry for entry in files if self._is_wanted(entry[0])]
        # Some repositories have their weights twice: for transformers, and in the authors' own format.
        if any(fnmatch.fnmatch(name, "model*.safetensors") for name, _ in chosen):
            chosen = [e for e in chosen if not e[0].startswith("original/") and not e[0].startswith("consolidated")]
        if any(part in {"", ".", ".."} for name, _ in chosen for part in name.split("/")):
            raise InvalidArgument(f"{place} has a file whose name leads out of its folder")
        if self._patterns == FILES and not any(name.endswith(_WEIGHTS) for name, _ in chosen):
            raise InvalidArgument(
                f"{place} has no weights in {_WEIGHTS}; pickled ones (.bin, .pt) are not loaded, because they can hold code"
            )
        names = {name for name, _ in chosen}
        hashes = [
            (str(entry.rfilename), str(entry.lfs.sha256))
            for entry in info.siblings or ()
            if entry.rfilename in names and entry.lfs is not None and entry.lfs.sha256
        ]
        listing = HubListing(str(info.sha), tuple(sorted(chosen)), tuple(sorted(hashes)))
        self._size = listing.size
        if self._max_bytes is not None and listing.size > self._max_bytes:
            raise InvalidArgument(f"{place} has {listing.size} bytes; {self._max_bytes} are the most that are taken")
        return listing

    def download(
        self,
        listing: HubListing,
        folder: Path,
        progress: Callable[[int], None] = ignore_progress,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> None:
        """Download all files of a commit into a folder. `progress` is called with byte counts, in any thread.

        Files that an earlier call left incomplete are resumed, if the Hub's library can.
        """
        hashes = dict(listing.hashes)
        works = [
            functools.partial(self._download_one, listing.commit, file, hashes.get(file[0], ""), folder, progress)
            for file in listing.files
        ]
        run_parallel(works, _AT_ONCE, cancelled)
        # Notes of the Hub's library about its downloads.
        shutil.rmtree(folder / ".cache", ignore_errors=True)

    def _download_one(
        self,
        commit: str,
        file: tuple[str, int],
        sha256: str,
        folder: Path,
        progress: Callable[[int], None],
        stopped: Stopped,
    ) -> None:
        name, size = file

        def on_bytes(size: int) -> None:
            if stopped():
                raise Cancelled(f"downloading {self._place} was cancelled")
            progress(size)

        path = self._persistently(lambda: self._downloaded(commit, name, folder, on_bytes))
        if size and Path(path).stat().st_size != size:
            raise DataDamaged(f"{name} of {self._place} came with another size than the Hub says it has; try again")
        expected = from_hex("sha256", sha256)
        if expected is not None and not expected.fits(Path(path), stopped):
            raise DataDamaged(f"{name} of {self._place} came with another SHA-256 than the Hub says it has; try again")

    def _info(self) -> Any:
        from huggingface_hub import HfApi

        place = self._place
        api = HfApi(endpoint=self._endpoint, token=self._token)
        return api.model_info(
            place.repository, revision=place.revision or None, files_metadata=True, timeout=_LOOK_SECONDS
        )

    def _downloaded(self, commit: str, name: str, folder: Path, on_bytes: Callable[[int], None]) -> str:
        from huggingface_hub import hf_hub_download

        on_bytes(0)
        return hf_hub_download(
            self._place.repository,
            name,
            revision=commit,
            local_dir=folder,
            endpoint=self._endpoint,
            token=self._token,
            tqdm_class=_bar(on_bytes),
        )

    def _persistently(self, work: Callable[[], T]) -> T:
        """Retry after a lost connection: a server may close an idle one just when it is reused."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(_Cut), self._translated_errors():
                return work()
        with self._translated_errors():
            return work()

    def _is_wanted(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in self._patterns)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Convert exceptions of the Hub's library."""
        try:
            import httpx2
            from huggingface_hub import errors
        except ImportError:
            raise MissingExtra(str(self._place), "cloud") from None
        place, hub = self._place, public_text(self._endpoint or "https://huggingface.co")
        try:
            yield
        except HeadraceError:
            raise
        except errors.GatedRepoError:
            raise PermissionDenied(
                f"{place} is gated: ask for access on its page at {hub}, then set HF_TOKEN to a token of that account"
            ) from None
        except errors.RevisionNotFoundError:
            raise NotFound(f"{place.repository} has no revision {place.revision} at {hub}") from None
        except errors.RepositoryNotFoundError:
            raise NotFound(
                f"{place.repository} was not found at {hub}: it does not exist, or is private and HF_TOKEN may not read it"
            ) from None
        except errors.OfflineModeIsEnabled:
            raise FailedPrecondition(f"{place} is not downloaded because HF_HUB_OFFLINE is set; unset it") from None
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", "an error")
            kind = PermissionDenied if status in {401, 403} else NotFound if status == 404 else Unavailable
            log.warning("%s at %s: %s", place, hub, status)
            raise kind(f"{hub} answered {status} for {place}") from None
        except (httpx2.HTTPError, ConnectionError, TimeoutError, errors.LocalEntryNotFoundError) as error:
            log.warning("%s at %s: %s", place, hub, type(error).__name__)
            kind = _Cut if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError) else Unavailable
            raise kind(
                f"{hub} could not be reached for {place} ({type(error).__name__}); check the network and HF_ENDPOINT"
            ) from None
        except OSError as error:
            log.warning("%s: %s", place, error)
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise DiskFull(f"there is no room for {place}", self._size) from None
            raise FailedPrecondition(f"{place} could not be written: {os.strerror(error.errno or 0)}") from None
        except (ValueError, errors.EntryNotFoundError, RuntimeError) as error:
            log.warning("%s at %s: %s", place, hub, error)
            raise Unavailable(f"{hub} did not answer as expected for {place} ({type(error).__name__})") from None


def _bar(on_bytes: Callable[[int], None]) -> Any:
    """Return a progress bar class for the Hub's library. With `update_transfer`, it does not make a second one."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    def begin(self: Any, *args: Any, **named: Any) -> None:
        tqdm.__init__(self, *args, **{**named, "disable": True})

    def update(_self: Any, size: float | None = 1) -> None:
        on_bytes(int(size or 0))

    def update_transfer(_self: Any, *_args: Any, **_named: Any) -> None:
        on_bytes(0)

    members = {
        "__init__": begin,
        "update": update,
        "update_transfer": update_transfer,
        "set_transfer_postfix_str": update_transfer,
    }
    return type("CallbackBar", (tqdm,), members)
