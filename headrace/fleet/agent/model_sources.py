# SPDX-License-Identifier: Apache-2.0
"""Read a model's `spec.storage`: where it comes from, where it goes, and its credentials.

Besides the schemes of `headrace.models.storage.locations`: `local://` and `file://` (already on the node), `vendor://`
(something else puts it there), `pvc://` (pods mount it), and `oci://` (Oracle Object Storage through its S3 API).
"""

from __future__ import annotations

import base64
import binascii
import logging
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Unavailable
from headrace.fleet.agent.model_keys import SECRETS
from headrace.models.storage.credentials import BucketKeys, CloudCredentials
from headrace.models.storage.hugging_face import FILES
from headrace.models.storage.locations import (
    CLOUD_SCHEMES,
    HUB_SCHEME,
    WEB_SCHEMES,
    HubLocation,
    LocalLocation,
    Location,
    ObjectLocation,
    parse_location,
    public_text,
    scheme_of,
)
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str

SourceKind = Literal["download", "here", "vendor", "claim"]

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
class ModelSource:
    """Where a model comes from, and where it goes on the node."""

    kind: SourceKind
    uri: str
    path: str
    """Folder on the node; for `here`, where the files already are."""
    place: Location | None = None
    """The location to download from; None if nothing is downloaded."""
    endpoint: str = ""
    """Endpoint of the object store, if the URI names it."""
    region: str = ""
    parameters: Mapping[str, str] | None = None
    key: str = ""
    """Name of the Secret with the credentials."""
    reuse: bool = False
    """Adopt the files that are already at the path, if they match."""

    @property
    def shown(self) -> str:
        """The URI without its query, which may hold a signature; for messages."""
        return public_text(self.uri)

    @property
    def files(self) -> tuple[str, ...]:
        """The file patterns to download from the Hugging Face Hub."""
        patterns = [pattern.strip() for pattern in (self.parameters or {}).get("files", "").split(",")]
        return tuple(pattern for pattern in patterns if pattern) or FILES


def parse_source(model: Document) -> ModelSource:
    """Parse `spec.storage` of a model. Raises InvalidArgument."""
    storage = get_mapping(model, "spec", "storage")
    uri, path = get_str(storage, "storageUri"), get_str(storage, "path")
    if ".." not in path.split("/"):
        path = posixpath.normpath(path) if path else ""
    parameters = {name: value for name, value in get_mapping(storage, "parameters").items() if isinstance(value, str)}
    if not uri:
        raise InvalidArgument("spec.storage.storageUri is missing: write where the model is, hf://org/name or the like")
    scheme = scheme_of(uri)
    if scheme in ("pvc", "vendor"):
        return ModelSource("claim" if scheme == "pvc" else "vendor", uri, path)
    if scheme in ("local", "file", ""):
        return ModelSource("here", uri, path or _local_path(uri))
    if scheme not in _DOWNLOADED:
        known = ", ".join(f"{name}://" for name in ("hf", "s3", "gs", "az", "oci", "https", "pvc", "local", "vendor"))
        raise InvalidArgument(f"spec.storage.storageUri: {scheme}:// is not a scheme of models; write one of {known}")
    if not path:
        raise InvalidArgument(
            "spec.storage.path is missing: write the folder on the node where pods look for the model"
        )
    key, reuse = get_str(storage, "key"), get_str(storage, "downloadPolicy") == "ReuseIfExists"
    if scheme == "oci":
        return ModelSource("download", uri, path, *_parse_oci(uri, parameters), parameters, key, reuse)
    bare, region = _without_region(uri) if scheme == "s3" else (uri, "")
    return ModelSource("download", uri, path, parse_location(bare), "", region, parameters, key, reuse)


def credentials_from(source: ModelSource, secret: Document | None) -> CloudCredentials | None:
    """Return the credentials from the Secret and `parameters`. None: use those of the agent's environment.

    Raises FailedPrecondition if the store needs credentials and there are none.
    """
    parameters = source.parameters or {}
    values = {**_decode_secret(secret), **{name: value for name, value in parameters.items() if name != "secretKey"}}
    place = source.place
    if isinstance(place, HubLocation):
        names = (parameters["secretKey"], *_TOKEN) if "secretKey" in parameters else _TOKEN
        return CloudCredentials(hub_token=_first(values, names))
    if not isinstance(place, ObjectLocation):
        return None
    secret_key = _first(values, {"azure": _ACCOUNT_KEY, "gcp": _GOOGLE}.get(place.cloud, _SECRET))
    keys = BucketKeys(
        place.cloud,
        place.bucket,
        _first(values, _REGION) or source.region,
        _first(values, _ACCESS) if place.cloud not in ("azure", "gcp") else "",
        secret_key,
        _first(values, _ACCOUNT),
        (_first(values, _ENDPOINT) or source.endpoint).rstrip("/"),
    )
    if scheme_of(source.uri) == "oci" and not (keys.access_key and secret_key):
        raise FailedPrecondition(
            "oci:// is read with a customer secret key: make one in the console, put it into a Secret as access_key and "
            "secret_key, and name the Secret in spec.storage.key"
        )
    # The credentials of the agent's environment never go to an endpoint that a model's author names.
    anonymous = parameters.get("auth", "").lower() == "anonymous" or keys.endpoint_url
    return CloudCredentials((keys,)) if keys.access_key or keys.secret_key or anonymous else None


def _parse_oci(uri: str, parameters: Mapping[str, str]) -> tuple[ObjectLocation, str, str]:
    rest = uri.partition("://")[2]
    match = _OCI_FULL.fullmatch(rest) or _OCI_SHORT.fullmatch(rest)
    value = match.groupdict() if match is not None else {}
    space = value.get("space") or parameters.get("namespace", "")
    region = value.get("region") or parameters.get("region", "")
    endpoint = parameters.get("endpoint", "")
    if not value.get("bucket") or not (endpoint or (space and region)):
        raise InvalidArgument(
            "oci:// needs namespace, region and bucket: write oci://namespace@region/bucket/prefix, or "
            "oci://n/namespace/b/bucket/o/prefix with region in spec.storage.parameters"
        )
    place = parse_location(f"s3://{value['bucket']}/{value.get('key') or ''}")
    if not isinstance(place, ObjectLocation):
        raise InvalidArgument("oci:// names no bucket")
    return place, endpoint or f"https://{space}.compat.objectstorage.{region}.oraclecloud.com", region


def _without_region(uri: str) -> tuple[str, str]:
    """Split the region off s3://bucket@region/prefix, which OME writes."""
    bucket, slash, key = uri.partition("://")[2].partition("/")
    name, _, region = bucket.partition("@")
    return f"s3://{name}{slash}{key}", region


def _local_path(uri: str) -> str:
    path = uri.partition("://")[2] if scheme_of(uri) == "local" else ""
    if not path:
        place = parse_location(uri)
        path = str(place.path) if isinstance(place, LocalLocation) else ""
    if not path.startswith("/"):
        raise InvalidArgument("local:// needs an absolute path: local:///mnt/models/name, or spec.storage.path")
    return path


def _decode_secret(secret: Document | None) -> dict[str, str]:
    match: dict[str, str] = {}
    for name, value in get_mapping(secret, "data").items():
        try:
            match[name] = base64.b64decode(value, validate=True).decode().strip()
        except (binascii.Error, ValueError, TypeError):
            continue
    return match


def _first(value: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value[name] for name in names if value.get(name)), "")


log = logging.getLogger("headrace.agent")

SECRETS_ROLE = "headrace-model-agent-secrets"
"""The ClusterRole that an administrator binds in namespaces whose Secrets the agent may read."""


async def read_credentials(
    api: ApiClient, model: Document, source: ModelSource, agent_namespace: str
) -> CloudCredentials | None:
    """Read the Secret with a model's credentials: in the model's namespace, or in `agent_namespace` for a ClusterBaseModel.

    Raises HeadraceError.
    """
    if not source.key:
        return credentials_from(source, None)
    namespace = get_str(model, "metadata", "namespace") or agent_namespace
    subject = f"the Secret {source.key} of namespace {namespace}, which spec.storage.key names,"
    try:
        secret = await api.get(SECRETS, namespace, source.key)
    except Unreachable:
        raise Unavailable(f"{subject} could not be read: the API server does not answer") from None
    except ApiError as error:
        log.warning("%s cannot be read: %s", subject, error)
        if error.code == 403:
            also = f", or install it with --agent-secret {source.key}" if namespace == agent_namespace else ""
            raise PermissionDenied(
                f"{subject} may not be read by the agent; bind the ClusterRole {SECRETS_ROLE} to its service account by a "
                f"RoleBinding in {namespace}{also}"
            ) from None
        raise Unavailable(f"{subject} could not be read; the agent's log has more") from None
    if secret is None:
        raise FailedPrecondition(f"{subject} is not there; create it")
    return credentials_from(source, secret)
