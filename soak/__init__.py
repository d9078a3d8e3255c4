# SPDX-License-Identifier: Apache-2.0
"""A long run: a real server, mixed traffic, and whether anything of it grows. `python -m soak`, or `make soak`.

`served` starts the server, `traffic` asks it, `sampling` looks at its processes, `slopes` judges what was seen, `report`
shows it. Not a part of the product: nothing imports it.
"""
