# SPDX-License-Identifier: Apache-2.0
"""The peer `mlserver`: two models as custom runtimes (see the model-settings.json files beside it)."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Identity(MLModel):
    """INPUT0 comes back as OUTPUT0."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("OUTPUT0", rows)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


class First1000(MLModel):
    """The first 1,000 numbers of each row of INPUT0 come back as OUTPUT0."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        scores = np.ascontiguousarray(rows.reshape(rows.shape[0], -1)[:, :1000])
        output = NumpyCodec.encode_output("OUTPUT0", scores)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])
