# SPDX-License-Identifier: Apache-2.0
"""`identity` for Triton's Python backend: OUTPUT0 is the request's INPUT0."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The identity model, the way Triton's own examples write it."""

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", rows)]))
        return responses
