# SPDX-License-Identifier: Apache-2.0
"""Asks a service for what it makes of 1 until it is ended, then says what came of it: `python ask.py NAME URL`."""

import collections
import signal
import sys
import threading

enough = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: enough.set())  # before anything that takes its time, such as the next lines

import numpy as np  # noqa: E402

from headrace.client import NO_RETRY, Client  # noqa: E402
from headrace.core.errors import HeadraceError  # noqa: E402

name, url = sys.argv[1:]
one, made = np.ones((1, 1), np.float32), collections.Counter()
with Client(url, retry=NO_RETRY) as client:
    while not enough.wait(0.01):
        try:
            made[f"{client.infer(name, {'x': one})['y'].item():g}"] += 1
        except HeadraceError as error:
            made[f"failed ({error.message})"] += 1
        if made.total() == 1:
            print(f"{name} answers", flush=True)
print(f"{name}:", ", ".join(f"{count} times {what}" for what, count in made.most_common()), flush=True)
