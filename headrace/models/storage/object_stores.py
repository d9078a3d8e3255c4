# SPDX-License-Identifier: Apache-2.0
"""A client of obstore's for a bucket, made of a workspace's keys. Called by `objects` alone.

Where keys are given, nothing of the environment is used with them: neither its session token nor its endpoint.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.models.storage.addresses import tells_secrets
from headrace.models.storage.credentials import BucketKeys
from headrace.models.storage.fetching import addresses_of
from headrace.models.storage.locations import ObjectPlace
from headrace.models.storage.urls import parse_web_url

# In the order in which obstore looks at them.
_ENDPOINTS = {
    "aws": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "azure": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gcp": ("GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT_BASE_URL"),
}


def open_store(place: ObjectPlace, keys: BucketKeys | None, idle_seconds: float, retry_seconds: float) -> Any:
    """A store that knows this bucket. Without keys it looks for them where the clouds' own tools do."""
    from obstore import store

    endpoint = environment_endpoint(place) if keys is None else keys.endpoint_url
    if keys is not None and endpoint:
        _check_endpoint(endpoint)
    plain = endpoint.lower().startswith("http://")
    options: Any = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=min(idle_seconds, 10.0)),
        "read_timeout": timedelta(seconds=idle_seconds),
        # Of a whole answer; a large object takes long, and silence is bounded by the one before.
        "timeout": timedelta(days=7),
    }
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
    """Refuse a store at an address where the cloud keeps the machine's own credentials: a user has named it.

    Stores at private addresses are usual, so those pass. The store's client looks the name up again.
    """
    at = parse_web_url(url)
    try:
        found = addresses_of(at.host, at.port)
    except (OSError, UnicodeError):
        return  # the client will tell
    if any(map(tells_secrets, found)):
        raise InvalidArgument("endpoint_url is at an address where no object store can be")


def environment_endpoint(place: ObjectPlace) -> str:
    """Where the environment says that a store is; "" where its maker has it.

    Who writes http:// there means it, as who writes it into a workspace does.
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
        # This name and not `endpoint`, which a variable of the environment would overrule.
        "aws_endpoint_url_s3": keys.endpoint_url or f"https://s3.{region}.amazonaws.com",
    }
    if not keys.access_key:
        return {"config": {**config, "skip_signature": True}}
    # A provider, lest the environment's session token be sent with the workspace's keys.
    given = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": None, "expires_at": None}
    return {"config": config, "credential_provider": lambda: given}


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
    # Without a key it would ask the cloud's metadata for one.
    return {**config, "service_account_key": keys.secret_key} if keys.secret_key else {**config, "skip_signature": True}
