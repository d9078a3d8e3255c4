# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document knows every route of `/predict`, and none that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.api.openapi.document import base_document, undescribed_routes
from headrace.api.openapi.operations import strip_names
from headrace.api.openapi.predict_routes import predict_table
from headrace.api.predict.http import PredictHttp
from headrace.net.http.routes import Routes


def routes() -> Routes:
    routes = Routes()
    predict = PredictHttp(cast("Any", SimpleNamespace(loads_on_demand=False)))
    predict.add_to(routes)
    predict.health.add_to(routes)
    return routes


def test_every_route_is_described() -> None:
    table = predict_table()
    assert undescribed_routes(routes(), [table]) == []
    assert {(method, strip_names(path)) for method, path in table} == set(routes().listed())


def test_the_document_can_be_made() -> None:
    document = base_document(routes(), [predict_table()])
    assert document["paths"]["/predict/{model}"]["post"]["operationId"] == "post.predict.by-model"
    assert {"name": "Predict"} in document["tags"]
