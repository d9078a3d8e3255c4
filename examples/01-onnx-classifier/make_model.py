# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits and write it as ONNX: models/digits/1/model.onnx. Takes two seconds."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

images, digits = load_digits(return_X_y=True)  # 8 x 8 pixels from 0 to 16; they come with scikit-learn
learn, ask, learn_digits, ask_digits = train_test_split(images / 16, digits, test_size=0.25, random_state=0)
trained = LogisticRegression(max_iter=1000).fit(learn, learn_digits)
print(f"right for {trained.score(ask, ask_digits):.0%} of {len(ask)} digits it has not seen")

# softmax(pixels @ W + B). Most frameworks export ONNX themselves; "rows" is what lets requests be computed together.
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["pixels", "W", "B"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
    ],
    "digits",
    [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", 64])],
    [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", 10])],
    [
        numpy_helper.from_array(trained.coef_.T.astype(np.float32), "W"),
        numpy_helper.from_array(trained.intercept_.astype(np.float32), "B"),
    ],
)
file = Path("models/digits/1/model.onnx")
file.parent.mkdir(exist_ok=True)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
Path("build").mkdir(exist_ok=True)
np.save("build/digit.npy", ask[:1].astype(np.float32))
print(f"wrote {file}, and a {ask_digits[0]} to ask it about")
