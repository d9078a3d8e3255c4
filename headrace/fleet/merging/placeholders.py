# SPDX-License-Identifier: Apache-2.0
"""`{{ .Name }}` and its like in a main container, replaced by what the service is called.

Called by `components`. Known keys alone are replaced: a Jinja chat template in a command, which OME takes for one of its
own and fails on, stays as it is. `$(VAR)` is the kubelet's.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.fleet.words import Document, annotations_of, labels_of, name_of, namespace_of

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_KNOWN = re.compile(
    r"\{\{-?\s*(?:"
    r"\.(?P<field>Name|Namespace)"
    rf"|\.(?P<heap>Labels|Annotations)\.(?P<key>{_WORD})"
    r'|index\s+\.(?P<indexed>Labels|Annotations)\s+["`](?P<quoted>[^"`]{1,317})["`]'
    r")\s*-?\}\}"
)
_ANY = re.compile(r"\{\{[^}]{0,200}\}\}")


class Placeholders:
    """What the placeholders of one service stand for."""

    def __init__(self, service: Document) -> None:
        self._fields = {"Name": name_of(service), "Namespace": namespace_of(service)}
        self._heaps = {"Labels": labels_of(service), "Annotations": annotations_of(service)}

    def filled(self, value: Any) -> Any:
        """A value with its placeholders replaced, those of all texts in it; itself if there are none."""
        if isinstance(value, str):
            return _KNOWN.sub(self._value, value) if "{{" in value else value
        if isinstance(value, dict):
            made = {name: self.filled(each) for name, each in value.items()}
            return made if any(made[name] is not value[name] for name in value) else value
        if isinstance(value, list):
            listed = [self.filled(each) for each in value]
            return listed if any(new is not old for new, old in zip(listed, value, strict=True)) else value
        return value

    def _value(self, found: re.Match[str]) -> str:
        if found["field"]:
            return self._fields[found["field"]]
        heap, key = found["heap"] or found["indexed"], found["key"] or found["quoted"]
        # As with a Go template, a label that the service has not is empty.
        return self._heaps[heap].get(key, "")


def unknown(value: Any) -> str:
    """The first `{{ ... }}` that is left in a value; "" if there is none. OME refuses a service for it."""
    if isinstance(value, str):
        found = _ANY.search(value) if "{{" in value else None
        return found[0] if found else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((said for each in inner if (said := unknown(each))), "")
