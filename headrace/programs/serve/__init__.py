# SPDX-License-Identifier: Apache-2.0
"""Composition roots: settings become objects, objects run, and at the end they drain.

One module per program, and what programs share to run (`supervisor`). May not live here: anything that decides what a
request means.
"""
