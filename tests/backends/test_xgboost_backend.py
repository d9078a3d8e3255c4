# SPDX-License-Identifier: Apache-2.0
"""The XGBoost backend: every kind of booster, outputs by their names, and files that must not reach XGBoost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tabular_models import NO_SERVICES, completed_tensors, configured, in_a_process, open_instance, placed

from headrace.backends.contract import Placement
from headrace.backends.tabular import xgboost_file
from headrace.backends.tabular.ubjson import decode, encode
from headrace.backends.tabular.xgboost_file import PackedTrees, packed_trees
from headrace.core.dtypes import FP32, FP64, INT32, INT64
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument
from support.late_imports import late
from support.malicious_pickle import poisoned_pickle

pytestmark = pytest.mark.worker("frameworks")

xgb = late("xgboost")
booster = late("cases.xgboost", "booster")
XGBoostBackend = late("headrace.backends.tabular.xgboost", "XGBoostBackend")

TYPE_FP32, TYPE_INT64 = 11, 9
ROWS = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
INPUT = {"input": (FP32, (6,))}


def saved(model: Any, kind: str = "ubj") -> bytes:
    return bytes(model.save_raw(kind))


def trained(labels: Any = None, rows: Any = None, rounds: int = 3, data: Any = None, **settings: Any) -> Any:
    rows = np.random.default_rng(2).standard_normal((150, 6)).astype(np.float32) if rows is None else rows
    labels = rows[:, 0] if labels is None else labels(rows)
    matrix = xgb.DMatrix(rows, label=labels, nthread=1, **(data or {}))
    return xgb.train({"nthread": 1, **settings}, matrix, num_boost_round=rounds)


@pytest.mark.parametrize(
    ("objective", "outputs"),
    [
        ("multi:softprob", {"predict": (TYPE_INT64, [1]), "predict_proba": (TYPE_FP32, [4])}),
        ("binary:logistic", {"predict": (TYPE_INT64, [1]), "predict_proba": (TYPE_FP32, [2])}),
        ("reg:squarederror", {"predict": (TYPE_FP32, [1])}),
    ],
)
def test_the_file_determines_the_configuration(tmp_path: Path, objective: str, outputs: Any) -> None:
    answer = completed_tensors("xgboost", placed(tmp_path, saved(booster(objective)), "model.ubj"))
    assert answer == {"input": {"input": (TYPE_FP32, [6])}, "output": outputs, "max_batch_size": 64}


@pytest.mark.parametrize("kind", ["ubj", "json"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: trained(booster="dart", rate_drop=0.5), id="dart"),
        pytest.param(lambda: trained(booster="gblinear"), id="linear"),
        pytest.param(lambda: trained(lambda rows: rows[:, :2]), id="targets"),
        pytest.param(lambda: trained(lambda rows: rows[:, :2], multi_strategy="multi_output_tree"), id="target-trees"),
        pytest.param(lambda: trained(num_parallel_tree=3, subsample=0.5), id="forest"),
        pytest.param(lambda: trained(gamma=0.5, tree_method="exact", max_depth=8), id="pruned"),
        pytest.param(lambda: trained(lambda rows: np.abs(rows[:, 0]), objective="count:poisson"), id="poisson"),
    ],
)
def test_every_booster_answers_as_xgboost_does(tmp_path: Path, kind: str, model: Any) -> None:
    created_model = model()
    instance = open_instance(
        configured("xgboost", INPUT), placed(tmp_path, saved(created_model, kind), f"model.{kind}")
    )
    expected = created_model.predict(xgb.DMatrix(ROWS, nthread=1)).reshape(5, -1)
    margin = created_model.predict(xgb.DMatrix(ROWS, nthread=1), output_margin=True).reshape(5, -1)
    answer = instance.compute({"input": ROWS}, ["predict", "raw_score"])
    assert answer["predict"].dtype == np.float32
    np.testing.assert_allclose(answer["predict"], expected, rtol=1e-6)
    np.testing.assert_allclose(answer["raw_score"], margin, rtol=1e-6)


def test_columns_of_categories(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((200, 6)).astype(np.float32)
    rows[:, 1] = np.random.default_rng(3).integers(0, 9, 200)
    kinds = {"feature_types": ["q", "c", "q", "q", "q", "q"], "enable_categorical": True}
    model = trained(lambda rows: rows[:, 1] % 3, rows, data=kinds, max_cat_to_onehot=1)
    for kind in ("ubj", "json"):
        instance = open_instance(configured("xgboost", INPUT), placed(tmp_path, saved(model, kind), f"model.{kind}"))
        expected = model.predict(xgb.DMatrix(rows, nthread=1, **kinds))
        np.testing.assert_array_equal(instance.compute({"input": rows}, ["predict"])["predict"][:, 0], expected)


def test_a_binary_classifier_has_two_probabilities_and_a_threshold(tmp_path: Path) -> None:
    files = placed(tmp_path, saved(booster("binary:logistic")), "model.ubj")
    expected = booster("binary:logistic").predict(xgb.DMatrix(ROWS, nthread=1))
    for text, limit in ((None, 0.5), ("0.9", 0.9)):
        config = configured("xgboost", INPUT, parameters={} if text is None else {"threshold": text})
        answer = open_instance(config, files).compute({"input": ROWS}, ["predict", "predict_proba"])
        assert answer["predict"].tolist() == [[int(value > limit)] for value in expected]
        np.testing.assert_allclose(answer["predict_proba"], np.stack([1 - expected, expected], axis=1))
    with pytest.raises(InvalidArgument, match="parameter threshold is 'often': use a number"):
        open_instance(configured("xgboost", INPUT, parameters={"threshold": "often"}), files)


def test_softmax_returns_probabilities_too(tmp_path: Path) -> None:
    model = trained(lambda rows: np.abs(rows[:, 0]) > 0.5, objective="multi:softmax", num_class=3)
    instance = open_instance(configured("xgboost", INPUT), placed(tmp_path, saved(model), "model.ubj"))
    answer = instance.compute({"input": ROWS}, ["predict", "predict_proba"])
    assert answer["predict"][:, 0].tolist() == model.predict(xgb.DMatrix(ROWS, nthread=1)).tolist()
    np.testing.assert_allclose(answer["predict_proba"].sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "width", "expected"),
    [
        ({"predict_proba": "true"}, 2, lambda p: np.stack([1 - p, p], axis=1)),
        ({"predict_proba": "true"}, 1, lambda p: p.reshape(-1, 1)),
        ({"output_class": "true"}, 1, lambda p: (p > 0.5).reshape(-1, 1)),
        ({"is_classifier": "true", "threshold": "0.7"}, 1, lambda p: (p > 0.7).reshape(-1, 1)),
        ({}, 1, lambda p: p.reshape(-1, 1)),
    ],
)
def test_the_output_parameters_of_fil_are_honoured(tmp_path: Path, parameters: Any, width: int, expected: Any) -> None:
    files = placed(tmp_path, saved(booster("binary:logistic")), "xgboost.ubj")
    config = configured("xgboost", {"input__0": (FP32, (6,))}, {"output__0": (FP32, (width,))}, parameters=parameters)
    answer = open_instance(config, files).compute({"input__0": ROWS}, ["output__0"])["output__0"]
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected(booster("binary:logistic").predict(xgb.DMatrix(ROWS, nthread=1))))


def test_outputs_may_have_another_type_of_number(tmp_path: Path) -> None:
    files = placed(tmp_path, saved(booster("multi:softprob")), "model.ubj")
    outputs = {"predict": (INT32, (1,)), "predict_proba": (FP64, (4,))}
    answer = open_instance(configured("xgboost", INPUT, outputs), files).compute({"input": ROWS}, list(outputs))
    assert (answer["predict"].dtype, answer["predict_proba"].dtype) == (np.int32, np.float64)


@pytest.mark.parametrize(
    ("objective", "outputs", "sources"),
    [
        (
            "multi:softprob",
            {"label": (INT64, (1,)), "odds": (FP32, (4,))},
            {"label": "predict", "odds": "predict_proba"},
        ),
        (
            "multi:softprob",
            {"odds": (FP32, (4,)), "label": (INT32, (1,))},
            {"label": "predict", "odds": "predict_proba"},
        ),
        ("binary:logistic", {"y": (FP32, (1,))}, {"y": "output__0"}),
        ("binary:logistic", {"y": (FP64, (2,))}, {"y": "predict_proba"}),
        (
            "binary:logistic",
            {"y": (INT64, (1,)), "raw_score": (FP32, (1,))},
            {"y": "predict", "raw_score": "raw_score"},
        ),
    ],
)
def test_inputs_and_outputs_may_have_any_name(tmp_path: Path, objective: str, outputs: Any, sources: Any) -> None:
    files = placed(tmp_path, saved(booster(objective)), "model.ubj")
    own = open_instance(configured("xgboost", INPUT), files).compute({"input": ROWS}, list(sources.values()))
    config = configured("xgboost", {"features": (FP32, (6,))}, outputs)
    answer = open_instance(config, files).compute({"features": ROWS}, list(outputs))
    for name, source in sources.items():
        assert answer[name].dtype == outputs[name][0].numpy
        np.testing.assert_allclose(answer[name], own[source])


def test_columns_may_be_separate_inputs_under_the_models_names(tmp_path: Path) -> None:
    model = trained(data={"feature_names": list("abcdef")})
    files = placed(tmp_path, saved(model), "model.ubj")
    shuffled = "fbdace"
    config = configured("xgboost", dict.fromkeys(shuffled, (FP32, (1,))))
    given = {name: ROWS[:, ["abcdef".index(name)]] for name in shuffled}
    expected = model.inplace_predict(ROWS, validate_features=False)
    np.testing.assert_array_equal(open_instance(config, files).compute(given, ["predict"])["predict"][:, 0], expected)
    with pytest.raises(InvalidArgument, match="have 2 columns together, and the model has 6"):
        open_instance(configured("xgboost", {"a": (FP32, (1,)), "b": (FP32, (1,))}), files)


def test_rounds_after_the_best_are_not_used_unless_configured(tmp_path: Path) -> None:
    model = trained(rounds=6)
    model.set_attr(best_iteration="2")
    files = placed(tmp_path, saved(model), "model.ubj")
    for parameters, rounds in (
        ({}, (0, 3)),
        ({"iteration_range": "1,5"}, (1, 5)),
        ({"iteration_range": "0,6"}, (0, 6)),
    ):
        answer = open_instance(configured("xgboost", INPUT, parameters=parameters), files).compute(
            {"input": ROWS}, ["predict"]
        )
        expected = model.inplace_predict(ROWS, iteration_range=rounds)
        np.testing.assert_array_equal(answer["predict"][:, 0], expected)
    with pytest.raises(InvalidArgument, match="iteration_range is '0,7': use 'begin,end', with end at most 6"):
        open_instance(configured("xgboost", INPUT, parameters={"iteration_range": "0,7"}), files)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({"input": (FP64, (6,))}, None, "FP64 in the configuration and FP32 in the model"),
        ({"input": (FP32, (5,))}, None, r"shape \[-1, 5\] by the configuration .* and \[-1, 6\] in the model"),
        (INPUT, {"odds": (FP32, (3,))}, r"output 'odds' .* \[-1, 3\] by the configuration"),
        (
            INPUT,
            dict.fromkeys("abcde", (FP32, (-1,))),
            "unexpected inference output 'e', allowed outputs are: predict, predict_proba",
        ),
        (INPUT, {"predict_proba": (FP32, (3,))}, r"output 'predict_proba' .* \[-1, 4\] in the model"),
        (INPUT, {"predict_proba": (INT64, (4,))}, "INT64 in the configuration and FP32"),
    ],
)
def test_a_configuration_for_another_model_is_refused(tmp_path: Path, inputs: Any, outputs: Any, text: str) -> None:
    files = placed(tmp_path, saved(booster("multi:softprob")), "model.ubj")
    with pytest.raises(InvalidArgument, match=text):
        open_instance(configured("xgboost", inputs, outputs), files)


def test_rows_of_another_width_are_the_callers_error_and_no_rows_are_none(tmp_path: Path) -> None:
    instance = open_instance(
        configured("xgboost", INPUT), placed(tmp_path, saved(booster("multi:softprob")), "model.ubj")
    )
    for shape in ((1, 5), (1, 7), (6,), (1, 1, 6)):
        with pytest.raises(InvalidArgument, match="does not accept inputs of these shapes: 'input'"):
            instance.compute({"input": np.zeros(shape, np.float32)}, ["predict"])
    empty = instance.compute({"input": np.zeros((0, 6), np.float32)}, ["predict", "predict_proba"])
    assert (empty["predict"].shape, empty["predict_proba"].shape) == ((0, 1), (0, 4))


def test_instances_share_a_booster_that_lives_as_long_as_one_of_them(tmp_path: Path) -> None:
    files = placed(tmp_path, saved(booster("reg:squarederror")), "model.ubj")
    model = XGBoostBackend().load(configured("xgboost", INPUT), files, NO_SERVICES)
    first, second = model.open(Placement("a")), model.open(Placement("b"))
    first.close()
    model.close()
    assert second.compute({"input": ROWS}, ["predict"])["predict"].shape == (5, 1)
    with pytest.raises(Internal):
        first.compute({"input": ROWS}, ["predict"])


@pytest.mark.parametrize("filename", ["model.bin", "model.deprecated", "model.pkl", "model.joblib", "xgboost.model"])
def test_other_formats_are_refused_unopened(tmp_path: Path, filename: str) -> None:
    canary = tmp_path / "canary"
    files = placed(tmp_path, poisoned_pickle(canary), filename)
    with pytest.raises(InvalidArgument, match=rf"'{filename}' is neither .ubj nor .json.*save_model\('model.ubj'\)"):
        open_instance(configured("xgboost", INPUT, default_model_filename=filename), files)
    with pytest.raises(FailedPrecondition, match=r"has no file 'test/1/model.ubj' or 'test/1/model.json'"):
        open_instance(configured("xgboost", INPUT), files)
    (files.version_folder / "model.ubj").write_bytes(poisoned_pickle(canary))
    with pytest.raises(InvalidArgument, match="cannot read 'model.ubj'"):
        open_instance(configured("xgboost", INPUT), files)
    assert not canary.exists()


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    document = decode(bytearray(saved(booster("reg:squarederror"))))
    place = document["learner"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return bytes(encode(document))


TREE = ("gradient_booster", "model", "trees", 0)


def first(number: int) -> Any:
    return lambda array: np.concatenate([array[:1] * 0 + number, array[1:]]).astype(array.dtype)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*TREE, "left_children"), first(10**6)),
        ((*TREE, "right_children"), first(0)),
        ((*TREE, "right_children"), first(1)),
        ((*TREE, "split_indices"), first(6)),
        ((*TREE, "base_weights"), lambda array: array[:-1]),
        ((*TREE, "tree_param", "num_nodes"), "1073741824"),
        ((*TREE, "tree_param", "size_leaf_vector"), "7"),
        (("gradient_booster", "model", "tree_info"), [0, 0, 9, 0, 0]),
        (("gradient_booster", "model", "gbtree_model_param", "num_trees"), "6"),
        (("gradient_booster", "model", "iteration_indptr"), [0, 3, 2, 3, 4, 5]),
        (("learner_model_param", "num_feature"), "0"),
        (("learner_model_param", "num_class"), "-3"),
        (("learner_model_param", "base_score"), "[1,2,3]"),
        (("gradient_booster", "name"), "gbforest"),
    ],
)
def test_an_index_that_leaves_the_model_is_refused(tmp_path: Path, path: Any, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="XGBoost cannot read 'model.ubj'. It is damaged"):
        open_instance(configured("xgboost", INPUT), placed(tmp_path, changed(path, value), "model.ubj"))


def test_json_with_a_name_twice_or_endless_nesting_is_refused(tmp_path: Path) -> None:
    whole = json.loads(saved(booster("reg:squarederror"), "json"))
    twice = json.dumps(whole)[:-1].encode() + b', "version": [1, 0, 0]}'
    for content in (twice, b'{"learner":' + b"[" * 100_000, b"{L" + b"\xff" * 8, b"{}", b'{"learner": []}'):
        with pytest.raises(InvalidArgument, match="cannot read"):
            open_instance(configured("xgboost", INPUT), placed(tmp_path, content, "model.json"))


DAMAGED = """
import sys
import numpy as np
from pathlib import Path
from tabular_models import *
from headrace.core.errors import HeadraceError
from headrace.core.dtypes import FP32
import logging; logging.disable()
kind, folder = sys.argv[1], Path(sys.argv[2])
whole = (folder / f"whole.{kind}").read_bytes()
config = configured("xgboost", {"input": (FP32, (6,))})
served = 0
for copy in damaged(whole, 300, 4):
    try:
        instance = open_instance(config, placed(folder, copy, f"model.{kind}"))
        instance.compute({"input": np.zeros((3, 6), np.float32)}, ["predict"])
        served += 1
    except HeadraceError:
        pass
print("served", served)
"""


@pytest.mark.slow  # quick: test_backend_contract.py, files that are no model
@pytest.mark.parametrize("kind", ["ubj", "json"])
def test_damaged_files_do_not_end_the_process(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"whole.{kind}").write_bytes(saved(booster("reg:squarederror"), kind))
    ended = in_a_process(DAMAGED, kind, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert 0 < int(ended.stdout.split()[-1]) < 300


def one_by_one(data: bytes) -> bytes:
    """What becomes of a file when its trees are read one at a time."""
    return bytes(xgboost_file._checked(decode(bytearray(data)), bytearray(data)).content)


@pytest.mark.parametrize(
    "settings", [{}, {"gamma": 0.5, "tree_method": "exact", "max_depth": 8}], ids=["all", "pruned"]
)
def test_trees_checked_in_place_answer_like_rewritten_ones(settings: Any) -> None:
    data = saved(trained(rounds=140, **settings))
    content = bytes(xgboost_file.read_booster(bytearray(data)).content)
    anew = one_by_one(data)
    first = data.index(b"{L" + bytes(7) + b"\x0cbase_weights")
    assert data[first:][:5000] in content
    assert data[first:][:5000] not in anew
    kept, rewritten = (xgb.Booster(model_file=bytearray(made)) for made in (content, anew))
    np.testing.assert_array_equal(kept.inplace_predict(ROWS), rewritten.inplace_predict(ROWS))


@pytest.mark.parametrize("pruned", [False, True])
def test_no_tree_is_kept_that_would_be_refused_by_itself(pruned: bool) -> None:
    settings = {"gamma": 0.5, "tree_method": "exact", "max_depth": 8} if pruned else {}
    whole = saved(trained(rounds=2, **settings))
    choose = random.Random(3)
    names = [b"left_children", b"right_children", b"parents", b"split_indices", b"default_left", b"split_type"]
    names += [b"num_nodesSL", b"num_deletedSL", b"num_featureSL", b"categories_nodes", b"idi"]
    kept = refused = 0
    for number in range(400):
        copy = bytearray(whole)
        place = copy.index(names[number % len(names)]) + choose.randrange(13, 140)
        copy[place] = choose.choice([0, 1, 2, 3, 5, 127, 255, copy[place] ^ 1])
        try:
            document = decode(bytearray(copy), {"trees": packed_trees})
        except ValueError:
            continue
        if isinstance(document["learner"]["gradient_booster"]["model"]["trees"], PackedTrees):
            kept += 1
            one_by_one(bytes(copy))
        else:
            refused += 1
    assert kept > 10
    assert refused > 100


def test_trees_of_another_writer_are_read_one_by_one(tmp_path: Path) -> None:
    # Ours takes more bytes for a tree's number than XGBoost does.
    written = bytes(encode(decode(bytearray(saved(booster("reg:squarederror"))))))
    document = decode(bytearray(written), {"trees": packed_trees})
    assert isinstance(document["learner"]["gradient_booster"]["model"]["trees"], list)
    instance = open_instance(configured("xgboost", INPUT), placed(tmp_path, written, "model.ubj"))
    answer = instance.compute({"input": ROWS}, ["predict"])["predict"]
    np.testing.assert_array_equal(answer[:, 0], booster("reg:squarederror").inplace_predict(ROWS))
