# SPDX-License-Identifier: Apache-2.0
"""The fake of cuda-python. See `fake_tensorrt`."""
