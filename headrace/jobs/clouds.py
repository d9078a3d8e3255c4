# SPDX-License-Identifier: Apache-2.0
"""Kinds of workspaces: which details each needs, whether they open its bucket, and how a job is told of them (facts 3.3).

Called by `service` and `services`. Values of details are never in an error or a log.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound
from headrace.jobs.checks import check_json, check_text, strings_in
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import CLOUD_SCHEMES, ObjectPlace, parse_location
from headrace.models.storage.objects import ObjectLimits, ObjectSource
from headrace.models.storage.problems import NoSuchBucket

log = logging.getLogger("headrace.jobs")

INVALID = "Provided cloud credentials are invalid"
_CHECK = ObjectLimits(idle_seconds=10.0, retry_seconds=2.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """One cloud_type."""

    required: tuple[str, ...] = ()
    stores: bool = False
    """Whether it is an object store that we can read."""


KINDS: Mapping[str, Kind] = {
    "aws": Kind(("access_key", "secret_key"), stores=True),
    "seaweedfs": Kind(("access_key", "secret_key"), stores=True),
    "azure": Kind(("account_name", "access_key"), stores=True),
    "gcp": Kind(("secret_key",), stores=True),
    "huggingface": Kind(),
    "self_hosted": Kind(),
    "lepton": Kind(("lepton_workspace_id", "lepton_auth_token")),
    "slurm": Kind(("slurm_user", "slurm_hostname")),
}


def check_details(cloud_type: str, details: Mapping[str, Any]) -> str:
    """Raises InvalidArgument for a kind that is not known or a detail that is missing; returns the bucket, or ""."""
    kind = KINDS.get(cloud_type)
    if kind is None:
        raise InvalidArgument(f"cloud_type is not known: use one of {', '.join(KINDS)}")
    check_json(details, "cloud_specific_details")
    for text in strings_in(details):
        check_text(text, "a value of cloud_specific_details", 65_536)
    missing = [name for name in kind.required if not details.get(name)]
    if missing:
        raise InvalidArgument(f"cloud_specific_details of {cloud_type} needs {', '.join(missing)}")
    bucket = check_text(details.get("cloud_bucket_name"), "cloud_bucket_name", 255)
    if kind.stores and bucket:
        place = parse_location(f"{cloud_type if cloud_type != 'gcp' else 'gs'}://{bucket}/")
        if not isinstance(place, ObjectPlace) or place.key or place.bucket != bucket:
            raise InvalidArgument("cloud_bucket_name is no bucket's name")
    cloud_metadata(cloud_type, details)  # raises for what cannot be keys
    return bucket


def check_access(cloud_type: str, details: Mapping[str, Any]) -> None:
    """Ask the store for something that is not there: who is answered "no such thing" has been let in. Blocks."""
    bucket = str(details.get("cloud_bucket_name") or "")
    if not KINDS[cloud_type].stores or not bucket:
        return
    credentials = CloudCredentials.from_metadata(cloud_metadata(cloud_type, details))
    place = ObjectPlace(CLOUD_SCHEMES.get(cloud_type, "gcp"), bucket, f".headrace-check-{uuid.uuid4()}")
    try:
        ObjectSource(place, credentials, _CHECK).look()
    except NoSuchBucket:
        raise InvalidArgument(
            f"{INVALID}: there is no bucket {bucket[:64]}; check its name, the region and endpoint_url"
        ) from None
    except NotFound:
        pass
    except HeadraceError as error:
        log.info("a workspace's credentials are refused: %s", error.message)
        raise InvalidArgument(
            f"{INVALID}: the bucket {bucket[:64]} cannot be listed with them; check keys, region and endpoint_url"
        ) from None


def cloud_metadata(cloud_type: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """A job's `cloud_metadata`; {} for kinds that are no storage."""
    made: dict[str, Any] = {}
    if cloud_type == "huggingface":
        made = {"huggingface": {"token": str(details.get("token") or "")}} if details.get("token") else {}
    elif KINDS[cloud_type].stores and details.get("cloud_bucket_name"):
        names = ("cloud_region", "access_key", "account_name", "secret_key", "endpoint_url")
        keys = {name: details.get(name) or "" for name in names}
        if cloud_type == "azure":
            keys["secret_key"] = keys["access_key"]
        made = {cloud_type: {str(details["cloud_bucket_name"]): keys}}
    CloudCredentials.from_metadata(made)
    return made
