# SPDX-License-Identifier: Apache-2.0
"""Import TensorFlow with two settings that it reads from the environment only; the user's own values take precedence."""

from __future__ import annotations

import os

# Informational lines about CPU features and missing GPUs do not help here. Errors are still printed.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Otherwise all sessions share one intra-op thread pool of the size that the first session asked for.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")

import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

__all__ = ["AssetFileDef", "CallableOptions", "SavedModel", "TrackableObjectGraph", "tf"]
