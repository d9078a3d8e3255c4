# SPDX-License-Identifier: Apache-2.0
"""The LightGBM backend: every kind of booster, outputs by their names, and text that must not reach LightGBM."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tabular_models import completed_tensors, configured, in_a_process, open_instance, placed

from headrace.backends.tabular.lightgbm_file import check_numbers, parse_integers
from headrace.core.dtypes import FP32, FP64
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.late_imports import late
from support.malicious_pickle import poisoned_pickle

pytestmark = pytest.mark.worker("frameworks")

lgb = late("lightgbm")
booster = late("cases.lightgbm", "booster")

TYPE_FP64, TYPE_INT64 = 12, 9
ROWS = np.random.default_rng(1).standard_normal((7, 6))
INPUT = {"input": (FP64, (6,))}


def saved(model: Any) -> bytes:
    return str(model.model_to_string()).encode()


def trained(labels: Any = None, group: Any = None, rounds: int = 3, **settings: Any) -> Any:
    rows = np.random.default_rng(2).standard_normal((200, 6))
    labels = rows[:, 0] if labels is None else labels(rows)
    settings = {"num_threads": 1, "verbose": -1, "min_data_in_leaf": 5, **settings}
    return lgb.train(settings, lgb.Dataset(rows, labels, group=group), num_boost_round=rounds)


@pytest.mark.parametrize(
    ("objective", "outputs"),
    [
        ("multiclass", {"predict": (TYPE_INT64, [1]), "predict_proba": (TYPE_FP64, [4])}),
        ("binary", {"predict": (TYPE_INT64, [1]), "predict_proba": (TYPE_FP64, [2])}),
        ("regression", {"predict": (TYPE_FP64, [1])}),
    ],
)
def test_the_file_determines_the_configuration(tmp_path: Path, objective: str, outputs: Any) -> None:
    answer = completed_tensors("lightgbm", placed(tmp_path, saved(booster(objective)), "model.txt"))
    assert answer == {"input": {"input": (TYPE_FP64, [6])}, "output": outputs, "max_batch_size": 64}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: trained(linear_tree=True), id="linear"),
        pytest.param(lambda: trained(boosting="rf", bagging_freq=1, bagging_fraction=0.5), id="forest"),
        pytest.param(lambda: trained(boosting="dart"), id="dart"),
        pytest.param(lambda: trained(lambda rows: np.abs(rows[:, 0]), objective="poisson"), id="poisson"),
        pytest.param(lambda: trained(lambda rows: rows[:, 0] > 0, objective="cross_entropy"), id="cross-entropy"),
        pytest.param(lambda: trained(lambda rows: rows[:, 0] > 0, [80, 120], objective="lambdarank"), id="rank"),
        pytest.param(lambda: trained(min_data_in_leaf=1000), id="one-leaf"),
        pytest.param(lambda: trained(objective=lambda scores, data: (scores, np.ones_like(scores))), id="own"),
    ],
)
def test_every_booster_answers_as_lightgbm_does(tmp_path: Path, model: Any) -> None:
    created_model = model()
    instance = open_instance(configured("lightgbm", INPUT), placed(tmp_path, saved(created_model), "model.txt"))
    answer = instance.compute({"input": ROWS}, ["predict", "raw_score"])
    np.testing.assert_array_equal(answer["predict"][:, 0], created_model.predict(ROWS, num_threads=1))
    np.testing.assert_array_equal(answer["raw_score"][:, 0], created_model.predict(ROWS, raw_score=True, num_threads=1))


def test_classes_one_against_all(tmp_path: Path) -> None:
    model = trained(lambda rows: np.abs(rows[:, 0]) // 1 % 3, objective="multiclassova", num_class=3)
    instance = open_instance(configured("lightgbm", INPUT), placed(tmp_path, saved(model), "model.txt"))
    answer = instance.compute({"input": ROWS}, ["predict", "predict_proba"])
    expected = model.predict(ROWS, num_threads=1)
    np.testing.assert_array_equal(answer["predict_proba"], expected)
    np.testing.assert_array_equal(answer["predict"][:, 0], expected.argmax(axis=1))


def test_a_binary_classifier_as_fil_has_it_in_32_bits(tmp_path: Path) -> None:
    files = placed(tmp_path, saved(booster("binary")), "model.txt")
    parameters = {"model_type": "lightgbm", "predict_proba": "true"}
    config = configured("lightgbm", {"input__0": (FP32, (6,))}, {"output__0": (FP32, (1,))}, parameters=parameters)
    rows = ROWS.astype(np.float32)
    answer = open_instance(config, files).compute({"input__0": rows}, ["output__0"])["output__0"]
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer[:, 0], booster("binary").predict(rows, num_threads=1), rtol=1e-6)


def test_fewer_rounds_when_configured(tmp_path: Path) -> None:
    model = trained(rounds=6)
    files = placed(tmp_path, saved(model), "model.txt")
    parameters = {"start_iteration_predict": "1", "num_iteration_predict": "3"}
    answer = open_instance(configured("lightgbm", INPUT, parameters=parameters), files).compute(
        {"input": ROWS}, ["predict"]
    )
    expected = model.predict(ROWS, start_iteration=1, num_iteration=3, num_threads=1)
    np.testing.assert_array_equal(answer["predict"][:, 0], expected)
    with pytest.raises(InvalidArgument, match="parameter num_iteration_predict is 'most': use a whole number"):
        open_instance(configured("lightgbm", INPUT, parameters={"num_iteration_predict": "most"}), files)


def test_windows_line_ends_are_converted(tmp_path: Path) -> None:
    content = saved(booster("regression")).replace(b"\n", b"\r\n")
    instance = open_instance(configured("lightgbm", INPUT), placed(tmp_path, content, "model.txt"))
    expected = booster("regression").predict(ROWS, num_threads=1)
    np.testing.assert_array_equal(instance.compute({"input": ROWS}, ["predict"])["predict"][:, 0], expected)


def test_rows_of_another_width_are_the_callers_error_and_no_rows_are_none(tmp_path: Path) -> None:
    instance = open_instance(configured("lightgbm", INPUT), placed(tmp_path, saved(booster("multiclass")), "model.txt"))
    with pytest.raises(InvalidArgument, match=r"does not accept inputs of these shapes: 'input' \[1, 5\]"):
        instance.compute({"input": np.zeros((1, 5))}, ["predict"])
    assert instance.compute({"input": np.zeros((0, 6))}, ["predict_proba"])["predict_proba"].shape == (0, 4)


@pytest.mark.parametrize("filename", ["model.pkl", "model.joblib", "model.pickle", "model.json"])
def test_other_formats_are_refused_unopened(tmp_path: Path, filename: str) -> None:
    canary = tmp_path / "canary"
    files = placed(tmp_path, poisoned_pickle(canary), filename)
    with pytest.raises(InvalidArgument, match=rf"'{filename}' is not LightGBM's text.*save_model\('model.txt'\)"):
        open_instance(configured("lightgbm", INPUT, default_model_filename=filename), files)
    with pytest.raises(FailedPrecondition, match=r"has no file 'test/1/model.txt'"):
        open_instance(configured("lightgbm", INPUT), files)
    (files.version_folder / "model.txt").write_bytes(poisoned_pickle(canary))
    with pytest.raises(InvalidArgument, match="LightGBM cannot read 'model.txt'"):
        open_instance(configured("lightgbm", INPUT), files)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"left_child=-?\d+", "left_child=100000"),
        (r"right_child=-?\d+", "right_child=0"),
        (r"split_feature=\d+", "split_feature=6"),
        (r"num_leaves=\d+", "num_leaves=2000000000"),
        (r"leaf_value=\S+", "leaf_value=one"),
        (r"threshold=\S+", "threshold="),
        (r"num_cat=\d+", "num_cat=99"),
        (r"cat_boundaries=0 \d+", "cat_boundaries=0 4000000"),
        (r"cat_threshold=\d+", "cat_threshold=-1"),
        (r"num_tree_per_iteration=1", "num_tree_per_iteration=3"),
        (r"num_class=1", "num_class=2"),
        (r"max_feature_idx=5", "max_feature_idx=99999999999999"),
        (r"Tree=1", "Tree=7"),
        (r"objective=regression", "objective=%s%s%n"),
        (r"end of trees", "end of leaves"),
        (r"shrinkage=\S+", "shrinkage=" + "9" * 400),
    ],
)
def test_a_line_that_leaves_the_model_is_refused(tmp_path: Path, pattern: str, instead: str) -> None:
    text = saved(booster("regression")).decode()
    changed, count = re.subn(pattern, instead, text, count=1)
    assert count == 1
    with pytest.raises(InvalidArgument, match="LightGBM cannot read 'model.txt'. It is damaged"):
        open_instance(configured("lightgbm", INPUT), placed(tmp_path, changed.encode(), "model.txt"))


DAMAGED = """
import sys
import numpy as np
from pathlib import Path
from tabular_models import *
from headrace.core.errors import HeadraceError
from headrace.core.dtypes import FP64
import logging; logging.disable()
folder = Path(sys.argv[1])
whole = (folder / "whole.txt").read_bytes().partition(b"end of trees")[0] + b"end of trees" + bytes([10])
config = configured("lightgbm", {"input": (FP64, (6,))})
served = 0
for copy in damaged(whole, 300, 4):
    try:
        open_instance(config, placed(folder, copy, "model.txt")).compute({"input": np.zeros((3, 6))}, ["predict"])
        served += 1
    except HeadraceError:
        pass
print("served", served)
"""


@pytest.mark.slow  # quick: test_backend_contract.py, files that are no model
@pytest.mark.parametrize("objective", ["regression", "binary"])
def test_damaged_files_do_not_end_the_process(tmp_path: Path, objective: str) -> None:
    # The one has categories, and is read tree by tree.
    (tmp_path / "whole.txt").write_bytes(saved(booster(objective)))
    ended = in_a_process(DAMAGED, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert 0 < int(ended.stdout.split()[-1]) < 300


def reads_as_numbers(line: str, count: int) -> bool:
    tokens = line.split(" ")
    try:
        list(map(float, tokens))
    except ValueError:
        return False
    return len(tokens) == count and max(map(len, tokens)) <= 48


def test_numbers_are_parsed_as_python_parses_them() -> None:
    choose = random.Random(1)
    verdicts = {True: 0, False: 0}
    whole = re.compile(r"-?[0-9]+( -?[0-9]+)*")
    for _ in range(6000):
        line = "".join(
            choose.choices("0123456789+-.eE nfi", [6] * 10 + [1, 2, 2, 2, 1, 4, 0.2, 0.2, 0.2], k=choose.randrange(9))
        )
        line = choose.choice(["", "-1.5e-07 ", "nan "]) + line
        count = line.count(" ") + choose.choice([1, 1, 1, 2])
        expected = reads_as_numbers(line, count)
        verdicts[expected] += 1
        counts, many = np.array([count]), np.array([10**9])
        if expected:
            check_numbers([line.encode()], counts)
        else:
            with pytest.raises(ValueError, match="number|float"):
                check_numbers([line.encode()], counts)
        if expected and whole.fullmatch(line):
            numbers = parse_integers([line.encode()], counts, -many, many)
            assert numbers.tolist() == [int(token) for token in line.split(" ")]
        else:
            with pytest.raises(ValueError, match="number"):
                parse_integers([line.encode()], counts, -many, many)
    assert min(verdicts.values()) > 1000


def test_a_number_too_many_in_one_line_does_not_make_up_for_one_too_few_in_another() -> None:
    counts = np.array([2, 2])
    check_numbers([b"1 2", b"3 4"], counts)
    for lines in ([b"1 2 3", b"4"], [b"1", b"2 3 4"], [b"1 2", b"3 " + b"4" * 49], [b"1 2 ", b"3"]):
        with pytest.raises(ValueError, match="a line has an invalid number"):
            check_numbers(lines, counts)
    with pytest.raises(ValueError, match="a line has an invalid number"):
        parse_integers([b"1 2", b"3 4"], counts, np.array([0, 0]), np.array([4, 3]))
