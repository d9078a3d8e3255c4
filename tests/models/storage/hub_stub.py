# SPDX-License-Identifier: Apache-2.0
"""A fake of the Hugging Face Hub on loopback: the few routes that downloading a model needs."""

from __future__ import annotations

import hashlib
import json
from urllib.parse import unquote

from web_stub import Handler, WebStub, reply

COMMIT = "a" * 40


class HubStub(WebStub):
    """One model `org/name`, of one commit, on `main` and `v1`; `org/gated` is gated, `org/broken` fails."""

    def __init__(self, files: dict[str, bytes], token: str = "") -> None:
        super().__init__(default=self._answer)
        self.files = files
        self.token = token
        self.hashes: dict[str, str] = {}
        """SHA-256 of files that are large ones."""

    def _answer(self, handler: Handler) -> None:
        path = unquote(handler.path.partition("?")[0])
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            reply(handler, b"{}", status=401, x_error_code="RepoNotFound")
        elif "org/gated" in path:
            reply(handler, b"{}", status=403, x_error_code="GatedRepo", x_error_message="secret reasons")
        elif "org/broken" in path:
            reply(handler, b"{}", status=500)
        elif path in ("/api/models/org/name", *(f"/api/models/org/name/revision/{r}" for r in ("main", "v1", COMMIT))):
            siblings = [
                {"rfilename": name, "size": len(body), **self._large(name)} for name, body in self.files.items()
            ]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            reply(handler, json.dumps(info).encode(), content_type="application/json")
        elif path.startswith("/api/models/org/name/revision/"):
            reply(handler, b"{}", status=404, x_error_code="RevisionNotFound")
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            body = self.files[path.partition(f"{COMMIT}/")[2]]
            reply(handler, body, etag=f'"{hashlib.sha1(body).hexdigest()}"', x_repo_commit=COMMIT)
        else:
            reply(handler, b"{}", status=404, x_error_code="RepoNotFound")

    def _large(self, name: str) -> dict[str, object]:
        if name not in self.hashes:
            return {}
        return {"lfs": {"sha256": self.hashes[name], "size": len(self.files[name]), "pointerSize": 134}}
