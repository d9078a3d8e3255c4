# SPDX-License-Identifier: Apache-2.0
"""The peer `mosec`: JSON on one route and bare FP32 bytes on two others.

mosec reads --address, --port and --log-level from the command line itself.
"""

import numpy as np
from mosec import Server, Worker

LONGEST_BATCH_WAIT_MS = 1  # the shortest mosec allows


class IdentityJson(Worker):
    """{"input": [..]} to {"output": [..]}, in mosec's default encoding."""

    def forward(self, data):
        return [{"output": np.array(document["input"], dtype=np.float32).tolist()} for document in data]


class IdentityRaw(Worker):
    """FP32 bytes in, the same FP32 bytes out."""

    req_mime_type = "application/octet-stream"
    resp_mime_type = "application/octet-stream"

    def deserialize(self, data):
        return np.frombuffer(data, dtype=np.float32)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        return data


class First1000Raw(IdentityRaw):
    """FP32 bytes in, the first 1,000 numbers out."""

    def forward(self, data):
        return [row[:1000] for row in data]


if __name__ == "__main__":
    server = Server()
    # A batch as large as the number of connections fills at once; with any larger one mosec waits in vain.
    for worker, connections, route in (
        (IdentityJson, 16, "/identity"),
        (IdentityRaw, 16, "/identity-raw"),
        (First1000Raw, 8, "/first1000-raw"),
    ):
        server.append_worker(worker, max_batch_size=connections, max_wait_time=LONGEST_BATCH_WAIT_MS, route=route)
    server.run()
