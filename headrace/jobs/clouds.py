# SPDX-License-Identifier: Apache-2.0
"""Cloud types of workspaces: which details each needs, how access is checked, and how a job gets the credentials.

Values of details are never in an error or a log.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound
from headrace.jobs.validation import check_json, check_text, strings_in
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.errors import NoSuchBucket
from headrace.models.storage.locations import CLOUD_SCHEMES, ObjectLocation, parse_location
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

log = logging.getLogger("headrace.jobs")

INVALID = "Provided cloud credentials are invalid"
_CHECK_LIMITS = ObjectLimits(idle_seconds=10.0, retry_seconds=2.0)


@dataclass(frozen=True, slots=True)
class CloudType:
    """What one cloud_type needs."""

    required: tuple[str, ...] = ()
    stores: bool = False
    """Whether it is an object store that Headrace can read."""


CLOUD_TYPES: Mapping[str, CloudType] = {
    "aws": CloudType(("access_key", "secret_key"), stores=True),
    "seaweedfs": CloudType(("access_key", "secret_key"), stores=True),
    "azure": CloudType(("account_name", "access_key"), stores=True),
    "gcp": CloudType(("secret_key",), stores=True),
    "huggingface": CloudType(),
    "self_hosted": CloudType(),
    "lepton": CloudType(("lepton_workspace_id", "lepton_auth_token")),
    "slurm": CloudType(("slurm_user", "slurm_hostname")),
}


def check_details(cloud_type: str, details: Mapping[str, Any]) -> str:
    """Check the type and details of a workspace; return its bucket, or ""."""
    cloud = CLOUD_TYPES.get(cloud_type)
    if cloud is None:
        raise InvalidArgument(f"unknown cloud_type: use one of {', '.join(CLOUD_TYPES)}")
    check_json(details, "cloud_specific_details")
    for text in strings_in(details):
        check_text(text, "a value of cloud_specific_details", 65_536)
    missing = [name for name in cloud.required if not details.get(name)]
    if missing:
        raise InvalidArgument(f"cloud_specific_details of {cloud_type} needs {', '.join(missing)}")
    bucket = check_text(details.get("cloud_bucket_name"), "cloud_bucket_name", 255)
    if cloud.stores and bucket:
        location = parse_location(f"{cloud_type if cloud_type != 'gcp' else 'gs'}://{bucket}/")
        if not isinstance(location, ObjectLocation) or location.key or location.bucket != bucket:
            raise InvalidArgument("cloud_bucket_name is not a valid bucket name")
    cloud_metadata(cloud_type, details)  # raises if the keys are malformed
    return bucket


def check_access(cloud_type: str, details: Mapping[str, Any]) -> None:
    """Check the credentials: list an object that does not exist; NotFound means access is granted. Blocks."""
    bucket = str(details.get("cloud_bucket_name") or "")
    if not CLOUD_TYPES[cloud_type].stores or not bucket:
        return
    credentials = CloudCredentials.from_metadata(cloud_metadata(cloud_type, details))
    location = ObjectLocation(CLOUD_SCHEMES.get(cloud_type, "gcp"), bucket, f".headrace-check-{uuid.uuid4()}")
    try:
        ObjectSource(location, credentials, _CHECK_LIMITS).read_listing()
    except NoSuchBucket:
        raise InvalidArgument(
            f"{INVALID}: there is no bucket {bucket[:64]}; check its name, the region and endpoint_url"
        ) from None
    except NotFound:
        pass
    except HeadraceError as error:
        log.info("Credentials of a workspace were rejected: %s", error.message)
        raise InvalidArgument(
            f"{INVALID}: the bucket {bucket[:64]} cannot be listed with them; check keys, region and endpoint_url"
        ) from None


def cloud_metadata(cloud_type: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `cloud_metadata` of a job; {} for types without storage."""
    metadata: dict[str, Any] = {}
    if cloud_type == "huggingface":
        metadata = {"huggingface": {"token": str(details.get("token") or "")}} if details.get("token") else {}
    elif CLOUD_TYPES[cloud_type].stores and details.get("cloud_bucket_name"):
        names = ("cloud_region", "access_key", "account_name", "secret_key", "endpoint_url")
        keys = {name: details.get(name) or "" for name in names}
        if cloud_type == "azure":
            keys["secret_key"] = keys["access_key"]
        metadata = {cloud_type: {str(details["cloud_bucket_name"]): keys}}
    CloudCredentials.from_metadata(metadata)
    return metadata
