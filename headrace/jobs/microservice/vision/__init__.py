# SPDX-License-Identifier: Apache-2.0
"""Pictures to a model's input, and its outputs to labels and boxes: numpy and Pillow, and no model.

Called by the kinds `classifier` and `detector`. Reads `preprocessor_config.json`, `config.json` and label files of a model's
folder; what a job's specs say counts for more.
"""
