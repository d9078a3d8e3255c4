# SPDX-License-Identifier: Apache-2.0
"""The keys of a workspace's object stores, by bucket, from the `cloud_metadata` that a job carries.

    {cloud_type: {bucket: {cloud_region, access_key, account_name, secret_key, endpoint_url}}}

Made by whoever reads a job, asked by `objects` and `hub`. A bucket that is not named has no keys: those of another bucket
are never tried on it. Nothing here is shown by `repr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument, PermissionDenied
from headrace.models.storage.locations import Cloud
from headrace.models.storage.urls import parse_web_url

_CLOUDS: dict[str, Cloud] = {
    "aws": "aws",
    "s3": "aws",
    "azure": "azure",
    "az": "azure",
    "gcp": "gcp",
    "gs": "gcp",
    "gcs": "gcp",
    "seaweedfs": "seaweedfs",
}
_HUB = "huggingface"
_FIELDS = ("cloud_region", "access_key", "account_name", "secret_key", "endpoint_url")


@dataclass(frozen=True, slots=True)
class BucketKeys:
    """How to reach one bucket."""

    cloud: Cloud
    bucket: str
    region: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    """Of gcp: the JSON text of a service account."""
    account_name: str = field(default="", repr=False)
    endpoint_url: str = ""
    """Where the store is, if not where its maker has it. Plain http is used only when this says http://."""


class CloudCredentials:
    """All keys of a workspace."""

    def __init__(self, buckets: tuple[BucketKeys, ...] = (), hub_token: str = "") -> None:
        self._buckets = {(keys.cloud, keys.bucket): keys for keys in buckets}
        self.hub_token = hub_token
        """For the Hugging Face Hub; "" to use `HF_TOKEN`."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> CloudCredentials:
        """From a job's `cloud_metadata`. Raises InvalidArgument that names the field, never its value."""
        found: list[BucketKeys] = []
        token = ""
        if not isinstance(metadata, Mapping):
            raise InvalidArgument("cloud_metadata must be an object: {cloud_type: {bucket: {...}}}")
        for name, buckets in metadata.items():
            if not isinstance(buckets, Mapping):
                raise InvalidArgument(f"cloud_metadata.{name} must be an object with a member for each bucket")
            kind = str(name).lower()
            if kind == _HUB:
                token = _hub_token(buckets)
            elif kind in _CLOUDS:
                found += [_keys(_CLOUDS[kind], str(bucket), details) for bucket, details in buckets.items()]
            # Others (self_hosted, lepton, slurm) tell of no store that we read.
        return cls(tuple(found), token)

    def keys_of(self, cloud: Cloud, bucket: str) -> BucketKeys:
        """The keys of this very bucket. SeaweedFS speaks S3, so s3:// finds its buckets too, if aws has none so named."""
        keys = self._buckets.get((cloud, bucket))
        if keys is None and cloud == "aws":
            keys = self._buckets.get(("seaweedfs", bucket))
        if keys is None:
            raise PermissionDenied(
                f"the workspace has no credentials for the {cloud} bucket {bucket}; "
                f"add it to cloud_metadata, or use a bucket that is there"
            )
        return keys

    def __repr__(self) -> str:
        return f"CloudCredentials({len(self._buckets)} buckets)"


def _keys(cloud: Cloud, bucket: str, details: object) -> BucketKeys:
    where = f"cloud_metadata.{cloud}.{bucket}"
    if not isinstance(details, Mapping):
        raise InvalidArgument(f"{where} must be an object with {', '.join(_FIELDS)}")
    said: dict[str, str] = {}
    for name in _FIELDS:
        value = details.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{where}.{name} must be a string")
        said[name] = (value or "").strip()
    endpoint = said["endpoint_url"]
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    if endpoint and not _is_web(endpoint):
        raise InvalidArgument(f"{where}.endpoint_url must be an http:// or https:// URL without user and query")
    return BucketKeys(
        cloud,
        bucket,
        said["cloud_region"],
        said["access_key"],
        said["secret_key"],
        said["account_name"],
        endpoint.rstrip("/"),
    )


def _is_web(url: str) -> bool:
    try:
        return "?" not in parse_web_url(url).target
    except InvalidArgument:
        return False


def _hub_token(details: Mapping[str, Any]) -> str:
    """A workspace's token lies at the top or below a name that stands where others have their bucket."""
    for value in (details, *details.values()):
        if isinstance(value, Mapping):
            token = value.get("token") or value.get("access_key")
            if isinstance(token, str) and token:
                return token
    return ""
