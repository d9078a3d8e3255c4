# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: malformed input for every parser of external bytes. Run it with `python -m fuzz`.

A target (`targets/`) is one parser and its invariants. `guided` generates inputs and keeps those that reach new code;
`libfuzzer` does the same with libFuzzer, where PyPI has a wheel for the machine. `corpus/` has the first inputs,
`regressions/` inputs that once broke something: `tests/fuzz` replays both. Not part of the product: nothing imports it.
"""
