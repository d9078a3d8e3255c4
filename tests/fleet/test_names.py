# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet import names

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,200}[a-z0-9])?", fullmatch=True)


def test_short_names_stay() -> None:
    assert names.trunc63("llama-chat-engine") == "llama-chat-engine"
    assert names.lws_name("llama-chat-engine") == "lws-llama-chat-engine"
    assert names.scaled_object_name("x" * 60) == "scaledobject-" + "x" * 50
    assert names.model_config_name("a" * 5 + "b" * 20) == "modelconfig-" + "b" * 20
    assert names.component_name("llama-chat", names.ROUTER) == "llama-chat-router"


def test_long_names_keep_their_end_behind_a_digest() -> None:
    name = "n" * 30 + "e" * 54
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    short = names.trunc63(name)
    assert short[9:] == "e" * 54
    assert short[1:8] == digest[1:8]
    assert short[0] == ("a" if digest[0].isdigit() else digest[0])


def test_labels_of_models() -> None:
    assert names.model_label("llama-3-70b") == "models.ome.io/clusterbasemodel.llama-3-70b"
    assert names.model_label("llama-3-70b", "team") == "models.ome.io/team.basemodel.llama-3-70b"
    long = "m" * 40
    digest = hashlib.sha256(long.encode()).hexdigest()[:8]
    assert names.model_label(long) == f"models.ome.io/clusterbasemodel.{digest}-{'m' * 23}"
    # The whole has 49 characters; a namespace over 8 becomes its digest, the model gets the other 30.
    space = hashlib.sha256(b"research-team").hexdigest()[:8]
    assert names.model_label(long, "research-team") == f"models.ome.io/{space}.basemodel.{digest}-{'m' * 21}"
    assert names.model_label(long, "team") == f"models.ome.io/team.basemodel.{digest}-{'m' * 25}"
    assert names.model_status_key(long, "research-team") == f"research-team.basemodel.{long}"


@given(NAMES, NAMES)
def test_what_is_made_of_any_name_fits(name: str, namespace: str) -> None:
    for made in (names.trunc63(name), names.lws_name(name), names.scaled_object_name(name)):
        assert len(made) <= 63
    for label in (names.model_label(name), names.model_label(name, namespace)):
        _, _, last = label.partition("/")
        assert len(last) <= 49
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", last)
    assert len(names.model_status_key(name, namespace)) <= 253


@given(NAMES, NAMES)
def test_different_names_stay_different(one: str, other: str) -> None:
    if one != other:
        assert names.trunc63(one) != names.trunc63(other)
        assert names.model_label(one) != names.model_label(other)
