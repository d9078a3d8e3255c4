# SPDX-License-Identifier: Apache-2.0
"""Objects as a current API server has them after a server-side apply: with the managed fields that it writes."""

from __future__ import annotations

import copy
import json
from typing import Any

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "webhooks": ("name",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
}
"""Fields that identify the items of a list. Other lists are owned as a whole."""
_WHOLE = frozenset({"selector", "fieldRef", "secretKeyRef", "configMapKeyRef", "namespaceSelector"})
"""Mappings that are owned as a whole."""


def as_applied(wanted: dict[str, Any], uid: str = "u1") -> dict[str, Any]:
    """The object after an apply by the operator, with the work of other controllers in it."""
    live = copy.deepcopy(wanted)
    fields = _fields({name: value for name, value in wanted.items() if name not in ("apiVersion", "kind")})
    for name in ("name", "namespace"):
        fields["f:metadata"].pop(f"f:{name}", None)
    entry = {"apiVersion": wanted["apiVersion"], "fieldsType": "FieldsV1", "fieldsV1": fields}
    others = {
        **entry,
        "manager": "kube-controller-manager",
        "operation": "Update",
        "subresource": "status",
        "fieldsV1": {"f:status": {"f:replicas": {}}},
    }
    live["metadata"] |= {
        "uid": uid,
        "resourceVersion": "7",
        "generation": 1,
        "managedFields": [others, {**entry, "manager": "headrace-operator", "operation": "Apply"}],
    }
    if wanted["kind"] == "Deployment":
        revision = {"deployment.kubernetes.io/revision": "1"}
        live["metadata"]["annotations"] = {**live["metadata"].get("annotations", {}), **revision}
        live["spec"] = {"replicas": 1, "paused": None, **live["spec"]}
    return live


def _fields(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and (name not in _WHOLE or name == "selector" and "matchLabels" not in value):
        return {f"f:{key}": _fields(item, key) for key, item in value.items() if item not in ("", None, {}, [])}
    if not isinstance(value, list) or not value:
        return {}
    if name == "ownerReferences":
        return {f"k:{_text({'uid': item['uid']})}": {} for item in value}
    keys = _KEYS.get(name, ())
    if name == "ports":
        keys = ("containerPort", "protocol") if "containerPort" in value[0] else ("port", "protocol")
    if not keys:
        return {}
    return {f"k:{_text({key: item[key] for key in keys})}": {".": {}, **_fields(item)} for item in value}


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, separators=(",", ":"))
