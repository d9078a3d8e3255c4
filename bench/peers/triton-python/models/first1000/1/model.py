# SPDX-License-Identifier: Apache-2.0
"""`first1000` for Triton's Python backend: OUTPUT0 is the first 1,000 numbers of each row of INPUT0."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The stand-in for an image classifier: a large input, a small output."""

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            scores = np.ascontiguousarray(rows.reshape(rows.shape[0], -1)[:, :1000])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", scores)]))
        return responses
