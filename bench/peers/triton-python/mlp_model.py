# SPDX-License-Identifier: Apache-2.0
"""`mlp` for Triton's Python backend: joins the requests of a batch, computes them once, splits the result."""

import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """ONNX Runtime on one thread, since there is one core; more threads would only wait for each other."""

    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        # model_repository is the folder of this model.
        file = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        batch = rows[0] if len(rows) == 1 else np.concatenate(rows)
        (result,) = self.session.run(["OUTPUT0"], {"INPUT0": batch})
        responses, start = [], 0
        for row in rows:
            end = start + len(row)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", result[start:end])]))
            start = end
        return responses
