# SPDX-License-Identifier: Apache-2.0
"""What a model's `storage` means: from where, to where, and with which keys. Pure.

Besides the schemes of `storage.locations`: `local://` and `file://` (there already), `vendor://` (somebody else brings it),
`pvc://` (pods mount it), and `oci://` (Oracle's Object Storage, through its interface that is S3's).
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.words import Document, part, text
from headrace.models.storage.credentials import BucketKeys, CloudCredentials
from headrace.models.storage.hub import FILES
from headrace.models.storage.locations import (
    CLOUD_SCHEMES,
    HUB_SCHEME,
    WEB_SCHEMES,
    HubPlace,
    LocalPlace,
    ObjectPlace,
    Place,
    parse_location,
    public_text,
    scheme_of,
)

Way = Literal["download", "here", "vendor", "claim"]

_OCI_FULL = re.compile(r"n/(?P<space>[^/]+)/b/(?P<bucket>[^/]+)/o(?:/(?P<key>.*))?")
_OCI_SHORT = re.compile(r"(?:(?P<space>[^/@]+)@(?P<region>[^/@]+)/)?(?P<bucket>[^/]+)(?:/(?P<key>.*))?")

_DOWNLOADED = {*CLOUD_SCHEMES, *WEB_SCHEMES, "hf", HUB_SCHEME, "oci"}

_TOKEN = ("token", "HF_TOKEN", "hf_token")
_ACCESS = ("access_key", "accessKeyId", "access_key_id", "AWS_ACCESS_KEY_ID", "awsAccessKeyID")
_SECRET = ("secret_key", "secretAccessKey", "secret_access_key", "AWS_SECRET_ACCESS_KEY", "awsSecretAccessKey")
_ACCOUNT = ("account_name", "accountName", "AZURE_STORAGE_ACCOUNT_NAME")
_ACCOUNT_KEY = ("account_key", "accountKey", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
_GOOGLE = ("service_account", "serviceAccount", "key.json", "gcloud-application-credentials.json")
_REGION = ("region", "AWS_DEFAULT_REGION", "AWS_REGION")
_ENDPOINT = ("endpoint", "endpoint_url", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and where it is to be."""

    way: Way
    uri: str
    path: str
    """On the node. Of `here`, where it is already."""
    place: Place | None = None
    """Of `download`."""
    endpoint: str = ""
    """Of the store, where the URI says it."""
    region: str = ""
    parameters: Mapping[str, str] | None = None
    key: str = ""
    """The Secret with the credentials."""
    reuse: bool = False
    """Files that are at the path already are taken over, if they are the right ones."""

    @property
    def shown(self) -> str:
        """The URI for logs and for people: what may be a signature is left out."""
        return public_text(self.uri)

    @property
    def files(self) -> tuple[str, ...]:
        """Which files of a model of the Hub."""
        said = [each.strip() for each in (self.parameters or {}).get("files", "").split(",")]
        return tuple(each for each in said if each) or FILES


def source_of(model: Document) -> Source:
    """What the model's storage says. Raises InvalidArgument that says what to write instead."""
    storage = part(model, "spec", "storage")
    uri, path = text(storage, "storageUri"), text(storage, "path")
    if ".." not in path.split("/"):
        path = posixpath.normpath(path) if path else ""
    parameters = {name: value for name, value in part(storage, "parameters").items() if isinstance(value, str)}
    if not uri:
        raise InvalidArgument("spec.storage.storageUri is missing: write where the model is, hf://org/name or the like")
    scheme = scheme_of(uri)
    if scheme in ("pvc", "vendor"):
        return Source("claim" if scheme == "pvc" else "vendor", uri, path)
    if scheme in ("local", "file", ""):
        return Source("here", uri, path or _local(uri))
    if scheme not in _DOWNLOADED:
        known = ", ".join(f"{name}://" for name in ("hf", "s3", "gs", "az", "oci", "https", "pvc", "local", "vendor"))
        raise InvalidArgument(f"spec.storage.storageUri: {scheme}:// is not a scheme of models; write one of {known}")
    if not path:
        raise InvalidArgument(
            "spec.storage.path is missing: write the folder on the node where pods look for the model"
        )
    key, reuse = text(storage, "key"), text(storage, "downloadPolicy") == "ReuseIfExists"
    if scheme == "oci":
        return Source("download", uri, path, *_oracle(uri, parameters), parameters, key, reuse)
    bare, region = _without_region(uri) if scheme == "s3" else (uri, "")
    return Source("download", uri, path, parse_location(bare), "", region, parameters, key, reuse)


def credentials_of(source: Source, secret: Document | None) -> CloudCredentials | None:
    """The keys for a download, of the Secret and of `parameters`. None: those of the agent's environment.

    Raises FailedPrecondition where the store is known to need some.
    """
    parameters = source.parameters or {}
    said = {**_decoded(secret), **{name: value for name, value in parameters.items() if name != "secretKey"}}
    place = source.place
    if isinstance(place, HubPlace):
        names = (parameters["secretKey"], *_TOKEN) if "secretKey" in parameters else _TOKEN
        return CloudCredentials(hub_token=_first(said, names))
    if not isinstance(place, ObjectPlace):
        return None
    secret_key = _first(said, {"azure": _ACCOUNT_KEY, "gcp": _GOOGLE}.get(place.cloud, _SECRET))
    keys = BucketKeys(
        place.cloud,
        place.bucket,
        _first(said, _REGION) or source.region,
        _first(said, _ACCESS) if place.cloud not in ("azure", "gcp") else "",
        secret_key,
        _first(said, _ACCOUNT),
        (_first(said, _ENDPOINT) or source.endpoint).rstrip("/"),
    )
    if scheme_of(source.uri) == "oci" and not (keys.access_key and secret_key):
        raise FailedPrecondition(
            "oci:// is read with a customer secret key: make one in the console, put it into a Secret as access_key and "
            "secret_key, and name the Secret in spec.storage.key"
        )
    # A store that the model's author names never gets the keys of the agent's own environment.
    anonymous = parameters.get("auth", "").lower() == "anonymous" or keys.endpoint_url
    return CloudCredentials((keys,)) if keys.access_key or keys.secret_key or anonymous else None


def _oracle(uri: str, parameters: Mapping[str, str]) -> tuple[ObjectPlace, str, str]:
    rest = uri.partition("://")[2]
    found = _OCI_FULL.fullmatch(rest) or _OCI_SHORT.fullmatch(rest)
    said = found.groupdict() if found is not None else {}
    space = said.get("space") or parameters.get("namespace", "")
    region = said.get("region") or parameters.get("region", "")
    endpoint = parameters.get("endpoint", "")
    if not said.get("bucket") or not (endpoint or (space and region)):
        raise InvalidArgument(
            "oci:// needs namespace, region and bucket: write oci://namespace@region/bucket/prefix, or "
            "oci://n/namespace/b/bucket/o/prefix with region in spec.storage.parameters"
        )
    place = parse_location(f"s3://{said['bucket']}/{said.get('key') or ''}")
    if not isinstance(place, ObjectPlace):
        raise InvalidArgument("oci:// names no bucket")
    return place, endpoint or f"https://{space}.compat.objectstorage.{region}.oraclecloud.com", region


def _without_region(uri: str) -> tuple[str, str]:
    """OME writes s3://bucket@region/prefix."""
    bucket, slash, key = uri.partition("://")[2].partition("/")
    name, _, region = bucket.partition("@")
    return f"s3://{name}{slash}{key}", region


def _local(uri: str) -> str:
    path = uri.partition("://")[2] if scheme_of(uri) == "local" else ""
    if not path:
        place = parse_location(uri)
        path = str(place.path) if isinstance(place, LocalPlace) else ""
    if not path.startswith("/"):
        raise InvalidArgument("local:// needs an absolute path: local:///mnt/models/name, or spec.storage.path")
    return path


def _decoded(secret: Document | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in part(secret, "data").items():
        try:
            found[name] = base64.b64decode(value, validate=True).decode().strip()
        except (binascii.Error, ValueError, TypeError):
            continue
    return found


def _first(said: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((said[name] for name in names if said.get(name)), "")
