# SPDX-License-Identifier: Apache-2.0
"""Models in TensorFlow's two formats, frozen GraphDef and SavedModel, computed by TensorFlow.

`backend` is what the engine calls. `graphdef` and `savedmodel` each read their format into a `function.Function`, which
`session` then computes; `operators` says which operators a file may have, `assets` which files its tables may read,
`variables` where its weights come from, and `settings` what a configuration means to TensorFlow. `runtime` is the only
place that imports it.
"""
