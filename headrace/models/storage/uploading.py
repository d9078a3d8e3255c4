# SPDX-License-Identifier: Apache-2.0
"""A small object written to a store: `upload`. Called in a thread, by who keeps something in a workspace's bucket."""

from __future__ import annotations

import logging

from headrace.core.errors import FailedPrecondition, NotFound, PermissionDenied, Unavailable
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectPlace
from headrace.models.storage.object_stores import open_store

log = logging.getLogger("headrace.storage")

_IDLE_SECONDS, _RETRY_SECONDS = 60.0, 10.0
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


def upload(place: ObjectPlace, content: bytes, credentials: CloudCredentials | None) -> None:
    """Write an object, in place of one that is there. Blocks; raises errors whose texts hold no secrets."""
    keys = None if credentials is None else credentials.keys_of(place.cloud, place.bucket)
    try:
        from obstore import exceptions
    except ImportError:
        raise FailedPrecondition(f"{place} needs obstore; install it with `pip install headrace[cloud]`") from None
    try:
        open_store(place, keys, _IDLE_SECONDS, _RETRY_SECONDS).put(place.key, content)
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise PermissionDenied(f"{place} may not be written with these credentials") from None
    except Exception as error:
        if isinstance(error, FileNotFoundError) or any(name in str(error) for name in _NO_BUCKET):
            raise NotFound(f"there is no bucket {place.bucket} for {place}; check its name and the region") from None
        # Its text may hold addresses and keys.
        log.warning("%s could not be written: %s", place, type(error).__name__)
        raise Unavailable(
            f"{place} could not be written: the store did not answer as expected; check the endpoint and the network"
        ) from None
