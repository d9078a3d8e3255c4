# SPDX-License-Identifier: Apache-2.0
"""Whether a node is one of those that a model is for: `storage.nodeSelector` and `storage.nodeAffinity`. Pure.

The rules are those of Kubernetes for pods: terms are alternatives, what is in a term must all be so.
"""

from __future__ import annotations

from headrace.fleet.words import Document, items, labels_of, name_of, part, text

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def belongs(model: Document, node: Document) -> bool:
    """Whether the model is to be on the node. Preferences exclude nothing."""
    storage, labels = part(model, "spec", "storage"), labels_of(node)
    if any(labels.get(name) != value for name, value in part(storage, "nodeSelector").items()):
        return False
    affinity = part(storage, "nodeAffinity")
    if not isinstance(affinity.get(_REQUIRED), dict):
        return True
    fields = {"metadata.name": name_of(node)}
    return any(_fits(term, labels, fields) for term in items(affinity, _REQUIRED, "nodeSelectorTerms"))


def _fits(term: Document, labels: dict[str, str], fields: dict[str, str]) -> bool:
    asked = [(each, labels) for each in items(term, "matchExpressions")]
    asked += [(each, fields) for each in items(term, "matchFields")]
    # An empty term is for no node, as in Kubernetes.
    return bool(asked) and all(_is_so(each, found) for each, found in asked)


def _is_so(asked: Document, found: dict[str, str]) -> bool:
    operator, values = text(asked, "operator"), items(asked, "values")
    said = found.get(text(asked, "key"))
    match operator:
        case "In":
            return said is not None and said in values
        case "NotIn":
            return said is None or said not in values
        case "Exists":
            return said is not None
        case "DoesNotExist":
            return said is None
        case "Gt" | "Lt":
            return _compares(operator, said, values)
    return False


def _compares(operator: str, said: str | None, values: list[object]) -> bool:
    try:
        number, bound = int(said or ""), int(str(values[0]))
    except (ValueError, IndexError):
        return False
    return number > bound if operator == "Gt" else number < bound
