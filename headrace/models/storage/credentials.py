# SPDX-License-Identifier: Apache-2.0
"""Credentials of object stores, by bucket, from the `cloud_metadata` of a job.

    {cloud_type: {bucket: {cloud_region, access_key, account_name, secret_key, endpoint_url}}}

A bucket that is not listed has no credentials: those of another bucket are never used for it. `repr` shows no secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument, PermissionDenied
from headrace.models.storage.locations import Cloud, parse_web_url

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
    """Credentials of one bucket."""

    cloud: Cloud
    bucket: str
    region: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    """For gcp: the JSON text of a service account."""
    account_name: str = field(default="", repr=False)
    endpoint_url: str = ""
    """The store's endpoint, if not the cloud's own. Plain http is used only if this says http://."""


class CloudCredentials:
    """All credentials of a workspace."""

    def __init__(self, buckets: tuple[BucketKeys, ...] = (), hub_token: str = "") -> None:
        self._buckets = {(keys.cloud, keys.bucket): keys for keys in buckets}
        self.hub_token = hub_token
        """For the Hugging Face Hub; "" to use `HF_TOKEN`."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> CloudCredentials:
        """Parse the `cloud_metadata` of a job. Raises InvalidArgument that names the field, never its value."""
        keys: list[BucketKeys] = []
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
                keys += [_keys(_CLOUDS[kind], str(bucket), details) for bucket, details in buckets.items()]
            # Other types (self_hosted, lepton, slurm) have no store that we read.
        return cls(tuple(keys), token)

    def keys_of(self, cloud: Cloud, bucket: str) -> BucketKeys:
        """Return the credentials of a bucket. s3:// also finds SeaweedFS buckets if aws has none of this name."""
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
    fields: dict[str, str] = {}
    for name in _FIELDS:
        value = details.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{where}.{name} must be a string")
        fields[name] = (value or "").strip()
    endpoint = fields["endpoint_url"]
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    if endpoint and not _is_valid_endpoint(endpoint):
        raise InvalidArgument(f"{where}.endpoint_url must be an http:// or https:// URL without user and query")
    return BucketKeys(
        cloud,
        bucket,
        fields["cloud_region"],
        fields["access_key"],
        fields["secret_key"],
        fields["account_name"],
        endpoint.rstrip("/"),
    )


def _is_valid_endpoint(url: str) -> bool:
    try:
        return "?" not in parse_web_url(url).target
    except InvalidArgument:
        return False


def _hub_token(details: Mapping[str, Any]) -> str:
    """Return the token: at the top level, or below a name in place of the bucket."""
    for value in (details, *details.values()):
        if isinstance(value, Mapping):
            token = value.get("token") or value.get("access_key")
            if isinstance(token, str) and token:
                return token
    return ""
