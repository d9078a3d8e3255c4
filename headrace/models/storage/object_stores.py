# SPDX-License-Identifier: Apache-2.0
"""Download from and upload to S3, Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import http.client
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

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
from headrace.core.fault_points import fault_point
from headrace.core.limits import MIB
from headrace.models.storage.checksums import etag_is_md5, from_etag, from_headers
from headrace.models.storage.credentials import BucketKeys, CloudCredentials
from headrace.models.storage.endpoint_proxy import proxy_url
from headrace.models.storage.errors import DataDamaged, NoRoom, NoSuchBucket, no_room
from headrace.models.storage.http_download import addresses_of, is_metadata_service, never_cancelled
from headrace.models.storage.locations import ObjectLocation, parse_web_url
from headrace.models.storage.parallel import Stopped, run_parallel
from headrace.models.storage.partial_files import Journal, Range, empty_folder, is_whole, make_file, missing, write_at
from headrace.models.storage.splice import splicer_for

# In the order in which obstore reads them.
_ENDPOINTS = {
    "aws": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "azure": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gcp": ("GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT_BASE_URL"),
}

_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def open_store(place: ObjectLocation, keys: BucketKeys | None, idle_seconds: float, retry_seconds: float) -> Any:
    """Open a bucket. Without keys, credentials are found as the clouds' own tools find them."""
    from obstore import store

    endpoint = environment_endpoint(place) if keys is None else keys.endpoint_url
    if keys is not None and endpoint:
        _check_endpoint(endpoint)
    plain = endpoint.lower().startswith("http://")
    options: Any = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=min(idle_seconds, 10.0)),
        "read_timeout": timedelta(seconds=idle_seconds),
        # For a whole answer; a large object takes long, and silence is bounded by the limit above.
        "timeout": timedelta(days=7),
    }
    if keys is not None and endpoint and not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        # A user has named it: its redirects must not lead elsewhere. An operator's own proxy decides that itself.
        options["proxy_url"] = proxy_url(endpoint)
    common: Any = {
        "client_options": options,
        "retry_config": {"max_retries": 5, "retry_timeout": timedelta(seconds=retry_seconds)},
    }
    if place.cloud == "azure":
        return store.AzureStore(place.bucket, config=_azure(keys), **common)
    if place.cloud == "gcp":
        return store.GCSStore(place.bucket, config=_google(keys), **common)
    return store.S3Store(place.bucket, **_amazon(keys), **common)


def _check_endpoint(url: str) -> None:
    """Refuse an endpoint at the address of a cloud's metadata service, since a user has named it.

    Stores at private addresses are usual, so they are allowed. `endpoint_proxy` checks the address that is connected to.
    """
    at = parse_web_url(url)
    try:
        addresses = addresses_of(at.host, at.port)
    except (OSError, UnicodeError):
        return  # The client will report it.
    if any(map(is_metadata_service, addresses)):
        raise InvalidArgument("endpoint_url is at an address where no object store can be")


def environment_endpoint(place: ObjectLocation) -> str:
    """Return the endpoint in the environment; "" for the cloud's own.

    An explicit http:// is accepted, as in a workspace.
    """
    names = _ENDPOINTS.get(place.cloud, _ENDPOINTS["aws"])
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _amazon(keys: BucketKeys | None) -> dict[str, Any]:
    if keys is None:
        return {}
    region = keys.region or "us-east-1"
    config: dict[str, Any] = {
        "region": region,
        "virtual_hosted_style_request": False,
        # Not `endpoint`, which an environment variable would override.
        "aws_endpoint_url_s3": keys.endpoint_url or f"https://s3.{region}.amazonaws.com",
    }
    if not keys.access_key:
        return {"config": {**config, "skip_signature": True}}
    # A provider, so that the environment's session token is not sent with the workspace's keys.
    credentials = {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": None,
        "expires_at": None,
    }
    return {"config": config, "credential_provider": lambda: credentials}


def _azure(keys: BucketKeys | None) -> Any:
    if keys is None:
        return {}
    config: dict[str, Any] = {"account_name": keys.account_name}
    if keys.endpoint_url:
        config["endpoint"] = keys.endpoint_url
    secret = keys.access_key or keys.secret_key
    if not secret:
        return {**config, "skip_signature": True}
    return {**config, "account_key": secret, "credential_type": "access_key"}


def _google(keys: BucketKeys | None) -> Any:
    if keys is None:
        return {}
    config: dict[str, Any] = {"base_url": keys.endpoint_url} if keys.endpoint_url else {}
    # Without a key it would query the cloud's metadata service.
    return {**config, "service_account_key": keys.secret_key} if keys.secret_key else {**config, "skip_signature": True}


log = logging.getLogger("headrace.storage")

_SECONDS = 10.0
_EMPTY = hashlib.sha256(b"").hexdigest()
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def headers_of(store: Any, place: ObjectLocation, keys: BucketKeys | None, key: str) -> Mapping[str, str] | None:
    """Return the headers of an object (names in lower case); None if they are not available."""
    try:
        if place.cloud == "azure":
            return _azure_headers(store, key)
        if place.cloud == "gcp":
            return None  # Signing may need yet another service.
        return _amazon_headers(place, keys or _of_environment(place), key)
    except Exception as error:  # Exceptions of obstore, of which there are many, and of the network.
        log.info("%s: no checksum could be requested: %s", place, type(error).__name__)
        return None


def _azure_headers(store: Any, key: str) -> Mapping[str, str] | None:
    import obstore

    # Signed for GET, which permits reading; for HEAD obstore would sign for no permission.
    return _head(obstore.sign(store, "GET", key, timedelta(minutes=5)), {})


def _amazon_headers(place: ObjectLocation, keys: BucketKeys, key: str) -> Mapping[str, str] | None:
    region = keys.region or "us-east-1"
    endpoint = keys.endpoint_url or f"https://s3.{region}.amazonaws.com"
    url = f"{endpoint}{quote(f'/{place.bucket}/{key}', safe='/-_.~')}"
    headers = {"x-amz-checksum-mode": "ENABLED"}
    if keys.access_key:
        token = "" if keys.bucket else os.environ.get("AWS_SESSION_TOKEN", "")
        headers |= {"x-amz-security-token": token} if token else {}
        headers = _signed(url, headers, region, keys)
    return _head(url, headers)


def _of_environment(place: ObjectLocation) -> BucketKeys:
    """Return the credentials in the environment, as obstore finds them; roles of a machine are left to obstore."""
    environ = os.environ
    return BucketKeys(
        place.cloud,
        "",
        environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "",
        environ.get("AWS_ACCESS_KEY_ID", ""),
        environ.get("AWS_SECRET_ACCESS_KEY", ""),
        endpoint_url=next((environ[name] for name in _ENDPOINT_VARIABLES if environ.get(name)), "").rstrip("/"),
    )


def _signed(url: str, headers: Mapping[str, str], region: str, keys: BucketKeys) -> dict[str, str]:
    """Sign a HEAD request without a body by AWS Signature Version 4."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    all_of_them = {**headers, "host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    names = sorted(all_of_them)
    lines = "".join(f"{name}:{all_of_them[name]}\n" for name in names)
    request = "\n".join(("HEAD", parts.path, "", lines, ";".join(names), _EMPTY))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    secret = f"AWS4{keys.secret_key}".encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    parameters = f"Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return {**all_of_them, "authorization": f"AWS4-HMAC-SHA256 {parameters}"}


def _head(url: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_SECONDS)
    try:
        connection.request("HEAD", parts.path + (f"?{parts.query}" if parts.query else ""), headers=dict(headers))
        answer = connection.getresponse()
        return {name.lower(): value for name, value in answer.getheaders()} if answer.status == 200 else None
    finally:
        connection.close()


_PIECE = 64 * 1024  # Larger pieces are assembled first, which costs one more copy.
_CHECKS_AT_ONCE = 4
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """Limits of downloads from object stores."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000
    idle_seconds: float = 60.0
    retry_seconds: float = 30.0
    """How long errors of the store and the network are retried."""
    part_bytes: int = 32 * MIB
    """Larger objects are downloaded in parts of this size, in parallel."""
    at_once: int = 8
    """Number of parallel requests."""


DEFAULT_LIMITS = ObjectLimits()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object, and its path in the folder."""

    key: str
    name: str
    size: int
    etag: str = ""
    """The ETag; "" if the store has none."""
    changed: str = ""
    """Last modification."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects at a location."""

    objects: tuple[StoredObject, ...]
    is_file: bool
    """One object of exactly this key, rather than those below it."""

    @property
    def size(self) -> int:
        """Size of all objects."""
        return sum(entry.size for entry in self.objects)

    @property
    def digest(self) -> str:
        """An identifier that changes with any object."""
        text = "\n".join(f"{entry.key}\t{entry.size}\t{entry.etag or entry.changed}" for entry in self.objects)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def ignore_progress(size: int) -> None:
    """Ignore progress."""


class ObjectSource:
    """One location in a store. Without credentials those of the environment are used."""

    def __init__(
        self, place: ObjectLocation, credentials: CloudCredentials | None, limits: ObjectLimits = DEFAULT_LIMITS
    ) -> None:
        self._place = place
        self._limits = limits
        self._logged = ""
        self._keys = None if credentials is None else credentials.keys_of(place.cloud, place.bucket)
        with self._translated_errors():
            self._store = open_store(place, self._keys, limits.idle_seconds, limits.retry_seconds)
        self._splicer = splicer_for(self._store, place, self._keys, limits.idle_seconds)

    def read_listing(self) -> Listing:
        """List the object of this key, or all below it. Raises NotFound if there is neither."""
        key = self._place.key
        with self._translated_errors():
            if key:
                try:
                    meta = self._store.head(key)
                except FileNotFoundError:
                    pass
                else:
                    return self._checked([_entry(meta, key.rpartition("/")[0])], is_file=True)
            objects: list[StoredObject] = []
            for page in self._store.list(prefix=key or None):
                objects += [_entry(meta, key) for meta in page]
                if len(objects) > self._limits.max_files:
                    raise InvalidArgument(f"{self._place} has more than {self._limits.max_files} objects")
        objects = _without_markers(objects, key)
        if not objects:
            raise NotFound(f"there is nothing at {self._place}; check the bucket, the key and the region")
        return self._checked(sorted(objects, key=lambda entry: entry.key), is_file=False)

    def download(
        self,
        listing: Listing,
        folder: Path,
        progress: Callable[[int], None] = ignore_progress,
        cancelled: Callable[[], bool] = never_cancelled,
        journal: Path | None = None,
    ) -> None:
        """Download a listing into a folder, large objects in parallel parts; then verify checksums.

        `progress` is called with byte counts, in any thread. Without `journal` the folder must be empty, and the caller
        removes what was written if this raises. With a journal, what an earlier attempt of the same listing left is
        kept and reported at once.
        """
        book = None
        if journal is not None:
            with self._translated_errors(folder, listing.size):
                book = Journal(journal, listing.digest)
                if not book.continues:
                    empty_folder(folder)
        try:
            works = self._works(listing, folder, book, progress)
            run_parallel(works, self._limits.at_once, cancelled)
        finally:
            if self._splicer is not None:
                self._splicer.close()
            if book is not None:
                book.close()
        checks = [functools.partial(self._check, folder, entry) for entry in listing.objects if entry.size]
        run_parallel(checks, _CHECKS_AT_ONCE, cancelled)

    def _works(
        self, listing: Listing, folder: Path, book: Journal | None, progress: Callable[[int], None]
    ) -> list[Callable[[Stopped], None]]:
        """Return the parts still to download."""
        works: list[Callable[[Stopped], None]] = []
        received = 0
        for entry in listing.objects:
            path = folder / entry.name
            had: list[Range] = []
            if book is not None and is_whole(path, entry.size):
                had = book.had(entry.name)
            if not had:
                self._make(path, entry, exist_ok=book is not None)
            received += sum(end - start for start, end in had)
            # Empty objects are left out: the marker of an empty folder cannot be read by the name it is listed under.
            for start, end in missing(had, entry.size, self._limits.part_bytes):
                works.append(functools.partial(self._download_part, path, entry, start, end, book, progress))
        if received:
            progress(received)
        return works

    def _make(self, path: Path, entry: StoredObject, *, exist_ok: bool) -> None:
        try:
            make_file(path, entry.size, exist_ok=exist_ok)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(no_room(str(self._place), path.parent, entry.size)) from None
            log.warning("cannot write %s: %s", path, error)
            raise FailedPrecondition(f"{entry.name} cannot be written into {path.parent}; is there room?") from None

    def _download_part(
        self,
        path: Path,
        entry: StoredObject,
        start: int,
        end: int,
        book: Journal | None,
        progress: Callable[[int], None],
        stopped: Stopped,
    ) -> None:
        """Download the bytes `start` to `end` of an object into its file."""
        at = start
        beyond = False
        try:
            with self._translated_errors(path.parent, entry.size), path.open("r+b", buffering=0) as file:
                if self._splicer is not None and not stopped():
                    at = self._splicer.part(entry.key, entry.etag, file.fileno(), start, end, progress, stopped)
                pieces = () if stopped() or at == end else self._pieces(entry, at, end)
                for piece in pieces:
                    beyond = at + len(piece) > end
                    if beyond or stopped():
                        break
                    write_at(file.fileno(), piece, at)
                    at += len(piece)
                    progress(len(piece))
                fault_point("storage.part.written")
        finally:
            if book is not None and at > start:
                book.wrote(entry.name, start, at)
        if stopped():
            raise Cancelled(f"downloading {self._place} was cancelled")
        if beyond or at != end:
            raise self._changed()

    def _pieces(self, entry: StoredObject, start: int, end: int) -> Iterable[Any]:
        answer = self._store.get(entry.key, options=_asked(entry, start, end))
        if not _is_same(entry.etag, answer.meta.get("e_tag") or ""):
            raise self._changed()
        return cast("Iterable[Any]", answer.stream(min_chunk_size=_PIECE))

    def _check(self, folder: Path, entry: StoredObject, stopped: Stopped) -> None:
        """Compare a file with the checksum of its store. Raises DataDamaged."""
        from_tag = from_etag(entry.etag) if self._place.cloud in {"aws", "seaweedfs"} else None
        expected = from_tag
        if from_tag is None and not stopped():
            headers = headers_of(self._store, self._place, self._keys, entry.key)
            same = headers is not None and _is_same(entry.etag, headers.get("etag", ""))
            expected = from_headers(headers) if headers is not None and same else None
        if expected is None or expected.fits(folder / entry.name, stopped):
            return
        if from_tag is not None:
            headers = headers_of(self._store, self._place, self._keys, entry.key)
            if headers is not None and not etag_is_md5(headers):
                return
        raise DataDamaged(
            f"{entry.name} of {self._place} came with another {expected.kind} than its store says it has; try again, and "
            "if that does not help, upload it again"
        )

    def _changed(self) -> Unavailable:
        return Unavailable(f"{self._place} changed or was cut off while it was downloaded; try again")

    def _checked(self, objects: list[StoredObject], *, is_file: bool) -> Listing:
        listing = Listing(tuple(objects), is_file)
        if listing.size > self._limits.max_bytes:
            raise InvalidArgument(
                f"{self._place} has more than {self._limits.max_bytes} bytes, the most that are taken"
            )
        names = {entry.name for entry in objects}
        for entry in objects:
            parts = entry.name.split("/")
            if any(part in {"", ".", ".."} for part in parts) or any(c in entry.name for c in "\\\0"):
                raise InvalidArgument(
                    f"{self._place} has an object whose key cannot be a file's name: {entry.key!r:.200}"
                )
            above = ["/".join(parts[:count]) for count in range(1, len(parts))]
            if len(names) != len(objects) or any(name in names for name in above):
                raise InvalidArgument(f"{self._place} has objects that would be file and folder of the same name")
        return listing

    def _log(self, text: str) -> None:
        """Log a message once."""
        if text != self._logged:
            log.warning("%s: %s", self._place, text)
        self._logged = text

    @contextlib.contextmanager
    def _translated_errors(self, folder: Path | None = None, size: int = 0) -> Iterator[None]:
        """Convert exceptions of obstore; their texts, which have addresses and requests, go to the log.

        `folder` and `size`: where bytes are being written, and how many.
        """
        place = self._place
        try:
            from obstore import exceptions
        except ImportError:
            raise MissingExtra(str(place), "cloud") from None
        try:
            yield
        except HeadraceError:
            raise
        except FileNotFoundError:
            raise NotFound(f"there is nothing at {place}; check the bucket, the key and the region") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise PermissionDenied(f"{place} may not be read with these credentials") from None
        except exceptions.PreconditionError:
            raise self._changed() from None
        except exceptions.InvalidPathError:
            raise InvalidArgument(
                f"{place} has an object whose key cannot be a file's name (`..`, `.`, `//`)"
            ) from None
        except (exceptions.BaseError, ValueError, OSError) as error:
            if any(name in str(error) for name in _NO_BUCKET):
                raise NoSuchBucket(
                    f"there is no bucket {place.bucket} for {place}; check its name and the region"
                ) from None
            self._log(_without_secrets(str(error)))
            if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(no_room(str(place), folder, size)) from None
            raise Unavailable(
                f"{place} could not be read: the store did not answer as expected; check the endpoint, the region and the "
                "network (the server's log has more)"
            ) from None


def _asked(entry: StoredObject, start: int, end: int) -> Any:
    """Return the conditions of a request: a part must be of the listed state; for a whole object the answer is compared."""
    if (start, end) == (0, entry.size):
        return None
    return {"range": (start, end), **({"if_match": entry.etag} if entry.etag else {})}


def _is_same(listed: str, reported: str) -> bool:
    """Return whether two ETags are equal, with or without quotes; a missing one matches."""
    return not listed or not reported or listed.strip('"') == reported.strip('"')


def _entry(meta: Any, above: str) -> StoredObject:
    key = str(meta["path"])
    name = key.removeprefix(f"{above}/") if above else key
    return StoredObject(key, name, int(meta["size"]), meta.get("e_tag") or "", str(meta.get("last_modified") or ""))


def _without_markers(objects: list[StoredObject], above: str) -> list[StoredObject]:
    """Leave out the empty objects with a trailing slash that stores use as "folders"; obstore lists them without it."""
    folders = {above} | {entry.key[:i] for entry in objects for i, char in enumerate(entry.key) if char == "/"}
    return [entry for entry in objects if entry.size or entry.key not in folders]


def _without_secrets(text: str) -> str:
    """Return the first line of a text, cut before a query: signed URLs have secrets there."""
    return text.splitlines()[0].partition("?")[0][:300] if text else ""


_IDLE_SECONDS, _RETRY_SECONDS = 60.0, 10.0


def upload(place: ObjectLocation, content: bytes, credentials: CloudCredentials | None) -> None:
    """Write an object, replacing an existing one. Blocks; error texts have no secrets."""
    keys = None if credentials is None else credentials.keys_of(place.cloud, place.bucket)
    try:
        from obstore import exceptions
    except ImportError:
        raise MissingExtra(str(place), "cloud") from None
    try:
        open_store(place, keys, _IDLE_SECONDS, _RETRY_SECONDS).put(place.key, content)
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise PermissionDenied(f"{place} may not be written with these credentials") from None
    except Exception as error:
        if isinstance(error, FileNotFoundError) or any(name in str(error) for name in _NO_BUCKET):
            raise NotFound(f"there is no bucket {place.bucket} for {place}; check its name and the region") from None
        # Its text may have addresses and keys.
        log.warning("%s could not be written: %s", place, type(error).__name__)
        raise Unavailable(
            f"{place} could not be written: the store did not answer as expected; check the endpoint and the network"
        ) from None
