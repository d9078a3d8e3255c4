# SPDX-License-Identifier: Apache-2.0
"""Write a forest in LightGBM's text format."""

import re
from pathlib import Path

import lightgbm as lgb
import numpy as np

from bench.formats.forest import ROUNDS, training

LEAVES = 127


def write(file: Path, size: int, row: np.ndarray) -> float:
    """Write so many bytes, or a few trees for 0; the answer to the row."""
    rows, labels = training()
    settings = {"verbose": -1, "num_leaves": LEAVES, "learning_rate": 0.05}
    text = lgb.train(settings, lgb.Dataset(rows, labels), num_boost_round=ROUNDS).model_to_string()
    times = size // len(text)
    file.write_text(_repeated(text, times) if times > 1 else text)
    return float(lgb.Booster(model_file=str(file)).predict(row, num_threads=1)[0])


def _repeated(text: str, times: int) -> str:
    front, end, behind = text.partition("end of trees\n")
    head, first, rest = front.partition("Tree=0\n")
    trees = [re.sub(r"^Tree=\d+\n", "", tree) for tree in re.split(r"(?m)^(?=Tree=\d+$)", first + rest) if tree]
    # The rate of learning is in the leaves already; they are weaker, so that the sum stays what it was.
    weaker = [re.sub(r"(?m)^leaf_value=(.*)$", lambda line: _divided(line[1], times), tree) for tree in trees]
    written = [f"Tree={index}\n{tree}" for index, tree in enumerate(weaker * times)]
    sizes = " ".join(str(len(tree)) for tree in written)
    return re.sub(r"tree_sizes=.*", f"tree_sizes={sizes}", head) + "".join(written) + end + behind


def _divided(values: str, times: int) -> str:
    return "leaf_value=" + " ".join(repr(float(value) / times) for value in values.split())
