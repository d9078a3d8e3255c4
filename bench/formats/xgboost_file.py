# SPDX-License-Identifier: Apache-2.0
"""Write a forest as XGBoost's UBJSON."""

import json
from pathlib import Path

import numpy as np
import xgboost as xgb

from bench.formats.forest import ROUNDS, training

DEPTH = 8


def write(file: Path, size: int, row: np.ndarray) -> float:
    """Write so many bytes, or a few trees for 0; the answer to the row."""
    rows, labels = training()
    settings = {"nthread": 0, "max_depth": DEPTH, "eta": 0.1}
    booster = xgb.train(settings, xgb.DMatrix(rows, labels), num_boost_round=ROUNDS)
    times = size // len(booster.save_raw("ubj"))
    if times > 1:
        document = json.loads(booster.save_raw("json"))
        model = document["learner"]["gradient_booster"]["model"]
        # Each less, so that the sum stays what it was.
        trees = [_weaker(tree, times) for tree in model["trees"]]
        model["trees"] = [{**tree, "id": index} for index, tree in enumerate(trees * times)]
        count = len(model["trees"])
        model["tree_info"] = [0] * count
        model["iteration_indptr"] = list(range(count + 1))
        model["gbtree_model_param"]["num_trees"] = str(count)
        booster = xgb.Booster()
        booster.load_model(bytearray(json.dumps(document).encode()))
    booster.save_model(file)
    booster.set_param({"nthread": 1})
    return float(booster.inplace_predict(row)[0])


def _weaker(tree: dict, times: int) -> dict:
    conditions = [
        value / times if left == -1 else value
        for value, left in zip(tree["split_conditions"], tree["left_children"], strict=True)
    ]
    return {**tree, "split_conditions": conditions}
