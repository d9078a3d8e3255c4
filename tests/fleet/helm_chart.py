# SPDX-License-Identifier: Apache-2.0
"""The charts, rendered by the helm that `scripts/platforms/helm.sh` brings."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
HELM = ROOT / "build" / "helm" / "helm"
CHARTS = ROOT / "deploy" / "helm"
NAMESPACE = "headrace-system"

Key = tuple[str, str, str]


def helm(*words: str | Path, kubeconfig: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """What helm says."""
    if not HELM.exists():
        raise RuntimeError("no helm; run scripts/platforms/helm.sh install")
    around = {**os.environ, "KUBECONFIG": str(kubeconfig or "/nowhere")}
    told = subprocess.run([HELM, *words], capture_output=True, text=True, env=around)
    if check and told.returncode:
        raise RuntimeError(f"helm {words}: {told.stderr.strip()}")
    return told


def rendered(chart: str, values: Any = None, *words: str, namespace: str = NAMESPACE) -> dict[Key, Any]:
    """The objects of a chart."""
    told = helm("template", chart, CHARTS / chart, "-n", namespace, "--set-json", _flat(values or {}), *words)
    return by_key(yaml.safe_load_all(told.stdout))


def by_key(objects: Iterable[Any]) -> dict[Key, Any]:
    """Objects by what they are called."""
    found: dict[Key, Any] = {}
    for each in objects:
        if each is not None:
            key = (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
            assert key not in found, key
            found[key] = each
    return found


def _flat(values: Any) -> str:
    return ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())
