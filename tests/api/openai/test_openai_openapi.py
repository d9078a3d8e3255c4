# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document knows every route of OpenAI's protocol, and none that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.api.openai.batches import Batches
from headrace.api.openai.files import Files
from headrace.api.openai.http import OpenAiHttp
from headrace.api.openapi.document import base_document, undescribed_routes
from headrace.api.openapi.openai_routes import batch_table, openai_table
from headrace.api.openapi.operations import OperationTable, strip_names
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.limits import BatchLimits
from headrace.net.http.routes import Routes


def routes() -> Routes:
    made = Routes()
    OpenAiHttp(cast("Any", SimpleNamespace(loads_on_demand=False)), kv_transfer=KvTransferSettings("prefill")).add_to(
        made
    )
    return made


def batch_routes() -> Routes:
    made = Routes()
    Files(cast("Any", None), BatchLimits()).add_to(made)
    Batches(cast("Any", None), lambda: None).add_to(made)
    return made


@pytest.mark.parametrize(("made", "table"), [(routes(), openai_table()), (batch_routes(), batch_table())])
def test_every_route_is_described(made: Routes, table: OperationTable) -> None:
    assert undescribed_routes(made, [table]) == []
    assert {(method, strip_names(path)) for method, path in table} == set(made.listed())


def test_the_document_can_be_made() -> None:
    document = base_document(routes(), [openai_table()])
    made = document["paths"]["/v1/chat/completions"]["post"]
    assert made["operationId"] == "post.v1.chat.completions"
    assert "text/event-stream" in made["responses"]["200"]["content"]
    assert {"name": "OpenAI"} in document["tags"]
