# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow backend: frozen GraphDefs and SavedModels, run by TensorFlow.

`backend` is the entry point. `graphdef` and `savedmodel` each read their format into a `function.Function`, which
`session` runs; `operators` decides which operators a file may contain. `runtime` is the only module that imports
TensorFlow.
"""
