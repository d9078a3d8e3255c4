# SPDX-License-Identifier: Apache-2.0
"""Text in capitals. The smallest useful Python model."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The server makes one of these for each instance."""

    def execute(self, requests):
        """Answer each request, in order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        capitals = np.empty(text.shape, dtype=object)
        try:
            capitals.ravel()[:] = [element.decode().upper().encode() for element in text.ravel()]
        except UnicodeDecodeError:
            # An error answers this request and leaves the others of the batch alone.
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("TEXT has bytes that are not UTF-8"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("CAPITALS", capitals)])
