# SPDX-License-Identifier: Apache-2.0
"""Models that go wrong, behind both protocols: the caller is always answered, and learns nothing it should not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.engines import config_of, plane_of
from support.serving import Serving, serving


def raises(_: Any) -> Any:
    raise RuntimeError("a secret of the model")


def numbers_for_strings(rows: Any) -> Any:
    answer = np.empty(rows.shape, object)
    answer[:] = 5
    return answer


MODELS = {
    "raises": raises,
    "short": lambda rows: rows[:-1],
    "retyped": lambda rows: rows.astype(np.float64),
    "nothing": lambda _: None,
    "strings": numbers_for_strings,
    "fine": lambda rows: rows,
}


def _model(name: str, compute: Any) -> Any:
    return config_of(name), lambda inputs: {"OUTPUT0": compute(inputs["INPUT0"])}


async def _site() -> Site:
    address = Address.parse("127.0.0.1:0")
    plane = await plane_of([_model(name, compute) for name, compute in MODELS.items()])
    return build_site(plane, ServerSettings(http=address, grpc=address))[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(_site) as running:
        yield running


def given(library: Any, name: str) -> Any:
    if name == "strings":
        array, datatype = np.array([[b"a"]], object), "BYTES"
    else:
        array, datatype = np.array([[1]], np.int32), "INT32"
    created = library.InferInput("INPUT0", [1, 1], datatype)
    created.set_data_from_numpy(array)
    return [created]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "fine"])
@pytest.mark.parametrize("form", ["http json", "http binary", "grpc"])
def test_a_fault_is_answered(server: Serving, name: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"127.0.0.1:{server.port}"
    library: Any = tritonclient.grpc if form == "grpc" else tritonclient.http
    client = library.InferenceServerClient(url)
    outputs = None
    if form != "grpc":
        outputs = [tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=form == "http binary")]
    with client, caplog.at_level(logging.ERROR):
        with pytest.raises(InferenceServerException) as failure:
            client.infer(name, given(library, name), outputs=outputs)
        assert "secret" not in str(failure.value)
        if name != "strings":
            assert failure.value.status() == ("StatusCode.INTERNAL" if form == "grpc" else "500")
            assert caplog.records
        assert client.infer("fine", given(library, "fine")).as_numpy("OUTPUT0").tolist() == [[1]]
