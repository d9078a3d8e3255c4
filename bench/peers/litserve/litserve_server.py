# SPDX-License-Identifier: Apache-2.0
"""The peer `litserve`: LitServe's own JSON, {"input": [..]} to {"output": [..]}."""

import sys

import litserve
import numpy as np


class Identity(litserve.LitAPI):
    """The identity model as LitServe's documentation writes an API."""

    def setup(self, device):
        self.model = lambda rows: rows

    def decode_request(self, request):
        return np.array(request["input"], dtype=np.float32)

    def predict(self, rows):
        return self.model(rows)

    def encode_response(self, output):
        return {"output": output.tolist()}


if __name__ == "__main__":
    # Batching and fast_queue were tried: no gain beyond the noise, so these are the defaults.
    server = litserve.LitServer(Identity(api_path="/identity"), accelerator="cpu")
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
