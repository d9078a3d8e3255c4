# SPDX-License-Identifier: Apache-2.0
"""Azurite, Azure's own emulator of its blob storage, in a process of its own. As `s3_server`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

from obstore.store import AzureStore
from s3_server import INSTALLED, program, running

from support.ports import free_port

ACCOUNT = "devstoreaccount1"
# The key that every Azurite has, printed in its manual.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class AzureServer:
    """One that runs. It checks signatures."""

    cloud_type, scheme, secret = "azure", "azure", KEY

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def make(self, container: str, objects: Mapping[str, bytes]) -> None:
        """A container with objects in it. obstore makes no containers."""
        date = formatdate(usegmt=True)
        fields = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
        text = "PUT" + "\n" * 12 + f"{fields}/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers = (f"x-ms-date: {date}", "x-ms-version: 2021-08-06", f"Authorization: SharedKey {ACCOUNT}:{signature}")
        named = [word for header in (*headers, "Content-Length: 0") for word in ("-H", header)]
        url = f"{self.endpoint}/{container}?restype=container"
        subprocess.run(["curl", "-sf", "-X", "PUT", *named, url], check=True, capture_output=True)
        self.put(container, objects)

    def put(self, container: str, objects: Mapping[str, bytes]) -> None:
        store = self.store(container)
        for key, body in objects.items():
            store.put(key, body)

    def store(self, container: str) -> AzureStore:
        config = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint}
        return AzureStore(container, config=config, client_options={"allow_http": True})

    def details(self, container: str) -> dict[str, Any]:
        """A workspace's `cloud_specific_details`."""
        keys = {"account_name": ACCOUNT, "access_key": KEY}
        return {**keys, "endpoint_url": self.endpoint, "cloud_bucket_name": container}


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """`folder` is for its objects and its log."""
    port = free_port()
    path = program("HEADRACE_AZURITE_BLOB", INSTALLED / "azurite" / "node_modules" / ".bin" / "azurite-blob")
    arguments = [
        path,
        "--silent",
        "--location",
        str(folder / "azurite"),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
    ]
    with running([*arguments, "--skipApiVersionCheck", "--disableTelemetry"], port, folder / "azurite.log"):
        yield AzureServer(f"http://127.0.0.1:{port}/{ACCOUNT}")
