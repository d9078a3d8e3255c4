# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: bytes that nobody would send, for everything here that reads bytes from elsewhere. `python -m fuzz` begins.

A target (`targets/`) is one reader and what must hold of it whatever it reads. `guided` makes inputs and follows what is new
to the code; `with_atheris` has libFuzzer do that, where PyPI has a wheel for the machine. `corpus/` are inputs worth
beginning with, `regressions/` those that once broke something: `tests/fuzz` plays both. Not a part of the product: nothing
imports it.
"""
