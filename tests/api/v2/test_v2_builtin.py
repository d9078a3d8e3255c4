# SPDX-License-Identifier: Apache-2.0
"""What the built-in models tell of themselves: there is no file behind them, and no repository."""

from __future__ import annotations

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException


def test_metadata_and_config(http: tritonclient.http.InferenceServerClient) -> None:
    metadata = http.get_model_metadata("first1000")
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 3, 224, 224]}]
    config = http.get_model_config("first1000")
    assert config["max_batch_size"] == 64
    assert config["output"][0]["data_type"] == "TYPE_FP32" and config["output"][0]["dims"] == [1000]
    assert http.get_model_config("identity")["input"][0]["data_type"] == "TYPE_INVALID"


def test_they_are_always_there(http: tritonclient.http.InferenceServerClient) -> None:
    index = http.get_model_repository_index()
    assert index == [{"name": name, "version": "1", "state": "READY"} for name in ("first1000", "identity")]
    with pytest.raises(InferenceServerException, match="serve a folder"):
        http.unload_model("identity")
    assert http.is_model_ready("identity")


def test_they_have_a_configuration_over_grpc_too(grpc_client: tritonclient.grpc.InferenceServerClient) -> None:
    config = grpc_client.get_model_config("first1000").config
    assert (config.name, config.max_batch_size, config.input[0].name) == ("first1000", 64, "INPUT0")
    assert [model.name for model in grpc_client.get_model_repository_index().models] == ["first1000", "identity"]
