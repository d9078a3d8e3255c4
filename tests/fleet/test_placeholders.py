# SPDX-License-Identifier: Apache-2.0
"""Placeholders of services, and templates that are none of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection_documents import service

from headrace.fleet.merging.metadata import Placeholders, find_placeholder

SERVICE = service("team", labels={"tier": "gold", "ome.io/x": "dotted"}, notes={"note": 'say "hi" & <b>'})


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("{{ .Name }}", "chat"),
        ("{{.Name}}-{{.Namespace}}", "chat-team"),
        ("{{- .Name -}}", "chat"),
        ("--tier={{ .Labels.tier }}", "--tier=gold"),
        ("{{ .Labels.absent }}", ""),
        ('{{ index .Labels "ome.io/x" }}', "dotted"),
        # OME goes through an HTML template, which would escape this.
        ("{{ .Annotations.note }}", 'say "hi" & <b>'),
        # Not ours: they stay.
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", None),
        ("{{ bos_token }}{{ .Names }}", None),
        ("{{ .Name | upper }}", None),
        ("$(MODEL_PATH) {{", None),
    ],
)
def test_texts(written: str, filled: str | None) -> None:
    assert Placeholders(SERVICE).filled(written) == (written if filled is None else filled)


def test_placeholders_are_filled_in_all_texts_of_a_copy() -> None:
    container = {
        "name": "c",
        "args": ["--name", "{{ .Name }}"],
        "env": [{"name": "X", "value": "{{.Namespace}}"}],
        "n": 3,
    }
    filled = Placeholders(SERVICE).filled(container)
    assert filled == {"name": "c", "args": ["--name", "chat"], "env": [{"name": "X", "value": "team"}], "n": 3}
    assert container["args"] == ["--name", "{{ .Name }}"]
    plain = {"name": "c", "args": ["x"]}
    assert Placeholders(SERVICE).filled(plain) is plain


def test_the_first_unknown_is_found() -> None:
    assert find_placeholder({"args": ["a", {"b": "x {{ bos }} {{ c }}"}]}) == "{{ bos }}"
    assert find_placeholder({"args": ["{% if x %}", 3, None]}) == ""


@given(st.text(st.sampled_from('{}. -Nameindx"`'), max_size=40))
def test_any_braces_are_text(written: str) -> None:
    once = Placeholders(SERVICE).filled(written)
    assert isinstance(once, str)
    if "Name" not in written:
        assert once == written
