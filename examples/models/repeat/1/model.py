# SPDX-License-Identifier: Apache-2.0
"""Many answers to one request: each number of IN by itself, after its delay."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The server makes one of these for each instance."""

    def initialize(self, args):
        """Called once, before the first request."""
        self._threads = set()

    def execute(self, requests):
        """Take the requests; the answers follow from other threads, so that the next requests need not wait."""
        for request in requests:
            thread = threading.Thread(target=self._answer, args=(request, request.get_response_sender()), daemon=True)
            self._threads.add(thread)
            thread.start()
        # A decoupled model returns nothing: it answers by the senders.

    def finalize(self):
        """Called once, at the end: let those who are still answering come to theirs."""
        for thread in list(self._threads):
            thread.join()

    def _answer(self, request, sender):
        try:
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            given = pb_utils.get_input_tensor_by_name(request, "DELAY")
            delays = np.zeros(len(numbers), np.uint32) if given is None else given.as_numpy()
            if len(delays) != len(numbers):
                error = pb_utils.TritonError(f"IN has {len(numbers)} numbers and DELAY {len(delays)}: send as many")
                sender.send(
                    pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                )
                return
            for index, (number, delay) in enumerate(zip(numbers, delays, strict=True)):
                time.sleep(delay / 1000)
                if request.is_cancelled():
                    break
                out = pb_utils.Tensor("OUT", np.array([number], np.int32))
                place = pb_utils.Tensor("INDEX", np.array([index], np.uint32))
                sender.send(pb_utils.InferenceResponse([out, place]))
            # Tells the server, and the client, that nothing follows.
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self._threads.discard(threading.current_thread())
