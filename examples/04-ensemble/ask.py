# SPDX-License-Identifier: Apache-2.0
"""Send picture files to the ensemble: `python ask.py URL FILE...`."""

import sys
from pathlib import Path

import numpy as np

from headrace.client import Client

with Client(sys.argv[1]) as client:
    for name in sys.argv[2:]:
        scores = client.infer("picture_to_colour", {"picture": np.array([[Path(name).read_bytes()]], object)})["scores"]
        print(name, ["red", "green", "blue"][int(scores[0].argmax())])
