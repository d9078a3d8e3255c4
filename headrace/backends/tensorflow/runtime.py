# SPDX-License-Identifier: Apache-2.0
"""TensorFlow, imported with the two settings that it reads from the environment only. What a user has set there stands."""

from __future__ import annotations

import os

# Informative lines about CPU features and missing GPUs are for those who build models. Errors still come.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Without it the threads inside an operator are one pool for the whole process, as large as its first session asked.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")

import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

__all__ = ["AssetFileDef", "CallableOptions", "SavedModel", "TrackableObjectGraph", "tf"]
