# SPDX-License-Identifier: Apache-2.0
"""Patch Debian's source of kube-apiserver 1.20 in two places, so that custom resources can replace newer APIs.

Called by `kubernetes.sh`, before it builds. Custom resources may then be of the groups `autoscaling` and `policy`, whose
names have no dot (autoscaling/v2, policy/v1), and requests for them come through. Tests that use them prove what was sent,
not that a newer Kubernetes would take it: no controller acts on them.
"""

from __future__ import annotations

import sys
from pathlib import Path

STAGING = "staging/src/k8s.io"
CHANGES = (
    (
        f"{STAGING}/apiextensions-apiserver/pkg/apis/apiextensions/validation/validation.go",
        'len(strings.Split(spec.Group, ".")) < 2 {',
        'len(strings.Split(spec.Group, ".")) < 2 && spec.Group != "autoscaling" && spec.Group != "policy" {',
    ),
    (
        f"{STAGING}/apiserver/pkg/server/handler.go",
        "if len(path) == len(ws.RootPath()) || path[len(ws.RootPath())] == '/' {",
        (
            "if len(path) == len(ws.RootPath()) || "
            "(path[len(ws.RootPath())] == '/' && (len(path) == len(ws.RootPath())+1 || "
            '!strings.HasPrefix(ws.RootPath(), "/apis/") || strings.Count(ws.RootPath(), "/") != 2)) {'
        ),
    ),
)


def main() -> None:
    """Apply all changes to the source in the folder that is given, or end with what does not fit."""
    root = Path(sys.argv[1])
    for name, old, new in CHANGES:
        path = root / name
        text = path.read_text()
        if new in text:
            continue
        if text.count(old) != 1:
            raise SystemExit(f"{path} is not the source that this change was made for")
        path.write_text(text.replace(old, new))


if __name__ == "__main__":
    main()
