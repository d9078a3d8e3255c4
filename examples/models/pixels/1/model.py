# SPDX-License-Identifier: Apache-2.0
"""Images to rows of numbers: what comes before a classifier, as a model of its own."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The server makes one of these for each instance."""

    def execute(self, requests):
        """Answer each request, in order."""
        responses = []
        for request in requests:
            # Each request brings its own rows: [rows, 8, 8].
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            numbers = image.reshape(len(image), 64).astype(np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", numbers)]))
        return responses
