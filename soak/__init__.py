# SPDX-License-Identifier: Apache-2.0
"""Soak test: a real server under mixed traffic, to find growth of memory, descriptors, threads or latency. `make soak`.

`served` starts the server, `traffic` asks it, `sampling` looks at its processes, `slopes` judges what was seen, `report`
shows it. Not a part of the product: nothing imports it.
"""
