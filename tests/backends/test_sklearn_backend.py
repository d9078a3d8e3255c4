# SPDX-License-Identifier: Apache-2.0
"""The scikit-learn backend: methods as outputs, columns of words and numbers, and files that may hold no code."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tabular_models import completed_tensors, configured, in_a_process, open_instance, placed

from headrace.core.dtypes import BYTES, FP32, FP64, INT64
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.late_imports import late
from support.malicious_pickle import poisoned_pickle

pytestmark = pytest.mark.worker("frameworks")

skops_io = late("skops.io")
forest = late("cases.sklearn", "forest")
pipeline = late("cases.sklearn", "pipeline")
KMeans = late("sklearn.cluster", "KMeans")
PCA = late("sklearn.decomposition", "PCA")
GradientBoostingRegressor = late("sklearn.ensemble", "GradientBoostingRegressor")
HistGradientBoostingClassifier = late("sklearn.ensemble", "HistGradientBoostingClassifier")
IsolationForest = late("sklearn.ensemble", "IsolationForest")
TfidfVectorizer = late("sklearn.feature_extraction.text", "TfidfVectorizer")
IsotonicRegression = late("sklearn.isotonic", "IsotonicRegression")
LogisticRegression = late("sklearn.linear_model", "LogisticRegression")
KNeighborsClassifier = late("sklearn.neighbors", "KNeighborsClassifier")
make_pipeline = late("sklearn.pipeline", "make_pipeline")
FunctionTransformer = late("sklearn.preprocessing", "FunctionTransformer")
DecisionTreeClassifier = late("sklearn.tree", "DecisionTreeClassifier")

TYPE_FP64, TYPE_INT64, TYPE_INT32, TYPE_STRING = 12, 9, 8, 13
ROWS = np.random.default_rng(1).standard_normal((120, 4))
LABELS = (ROWS[:, 0] > 0).astype(np.int64)
INPUT = {"input": (FP64, (4,))}


def saved(model: Any) -> bytes:
    return bytes(skops_io.dumps(model))


def test_the_file_determines_the_configuration(tmp_path: Path) -> None:
    answer = completed_tensors("sklearn", placed(tmp_path, saved(forest()), "model.skops"))
    assert answer == {
        "input": {"input": (TYPE_FP64, [4])},
        "output": {"predict": (TYPE_STRING, [1]), "predict_proba": (TYPE_FP64, [3])},
        "max_batch_size": 64,
    }
    answer = completed_tensors("sklearn", placed(tmp_path, saved(pipeline()), "model.skops"))
    assert answer["output"] == {"predict": (TYPE_FP64, [2])}


def test_methods_are_the_outputs(tmp_path: Path) -> None:
    files = placed(tmp_path, saved(PCA(2).fit(ROWS)), "model.skops")
    assert completed_tensors("sklearn", files)["output"] == {"transform": (TYPE_FP64, [2])}
    files = placed(tmp_path, saved(KMeans(3, n_init=1, random_state=1).fit(ROWS)), "model.skops")
    config = configured("sklearn", batch=0, parameters={"methods": "predict, transform"})
    assert completed_tensors("sklearn", files, config)["output"] == {
        "predict": (TYPE_INT32, [1]),
        "transform": (TYPE_FP64, [3]),
    }
    config = configured("sklearn", batch=0, parameters={"methods": "fit"})
    with pytest.raises(InvalidArgument, match="a KMeans, has no method 'fit': use one of predict, transform"):
        completed_tensors("sklearn", files, config)


def test_inputs_and_outputs_may_have_any_name(tmp_path: Path) -> None:
    created = LogisticRegression().fit(ROWS, LABELS)
    files = placed(tmp_path, saved(created), "model.skops")
    config = configured("sklearn", {"x": (FP64, (4,))}, {"odds": (FP64, (2,)), "label": (INT64, (1,))})
    answer = open_instance(config, files).compute({"x": ROWS}, ["odds", "label"])
    assert answer["label"][:, 0].tolist() == created.predict(ROWS).tolist()
    np.testing.assert_allclose(answer["odds"], created.predict_proba(ROWS))
    more = {"parameters": {"methods": "decision_function"}}
    config = configured("sklearn", {"x": (FP64, (4,))}, {"score": (FP64, (1,))}, **more)
    answer = open_instance(config, files).compute({"x": ROWS}, ["score"])
    np.testing.assert_allclose(answer["score"][:, 0], created.decision_function(ROWS))


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (lambda: HistGradientBoostingClassifier(max_iter=4).fit(ROWS, LABELS), "predict_proba"),
        (lambda: GradientBoostingRegressor(n_estimators=4).fit(ROWS, ROWS[:, 0]), "predict"),
        (lambda: IsolationForest(n_estimators=5, max_features=0.5, random_state=1).fit(ROWS), "score_samples"),
        (lambda: LogisticRegression().fit(ROWS, LABELS), "decision_function"),
        (lambda: LogisticRegression().fit(ROWS, LABELS), "predict_log_proba"),
        (lambda: FunctionTransformer(np.log1p).fit(ROWS), "transform"),
        (lambda: DecisionTreeClassifier().fit(ROWS, np.stack([LABELS, 1 - LABELS], axis=1)), "predict"),
    ],
)
def test_models_answer_as_scikit_learn_does(tmp_path: Path, model: Any, method: str) -> None:
    created_model = model()
    rows = np.abs(ROWS[:9])
    expected = np.asarray(getattr(created_model, method)(rows))
    given = configured("sklearn", INPUT, {method: (FP32 if expected.dtype.kind == "f" else INT64, (-1,))})
    answer = open_instance(given, placed(tmp_path, saved(created_model), "model.skops")).compute(
        {"input": rows}, [method]
    )[method]
    assert answer.ndim == 2
    np.testing.assert_allclose(answer, expected.reshape(9, -1), rtol=1e-6)


def test_columns_may_have_any_type_of_number(tmp_path: Path) -> None:
    created = DecisionTreeClassifier(max_depth=3).fit(np.floor(ROWS * 3), LABELS)
    config = configured("sklearn", {"a": (INT64, (2,)), "b": (FP32, (2,))}, {"predict": (INT64, (1,))})
    rows = np.floor(ROWS[:5] * 3)
    given = {"a": rows[:, :2].astype(np.int64), "b": rows[:, 2:].astype(np.float32)}
    answer = open_instance(config, placed(tmp_path, saved(created), "model.skops")).compute(given, ["predict"])
    assert answer["predict"][:, 0].tolist() == created.predict(rows).tolist()


def test_texts_are_rows_of_a_model_of_text(tmp_path: Path) -> None:
    texts = ["a good day", "a bad day", "good", "bad"]
    created = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, ["up", "down", "up", "down"])
    config = configured("sklearn", {"text": (BYTES, (1,))}, {"predict": (BYTES, (1,))})
    instance = open_instance(config, placed(tmp_path, saved(created), "model.skops"))
    answer = instance.compute({"text": np.array([[b"good good"], [b"bad"]], dtype=object)}, ["predict"])
    assert answer["predict"].tolist() == [[b"up"], [b"down"]]
    with pytest.raises(InvalidArgument, match="input 'text' has an element that is not UTF-8"):
        instance.compute({"text": np.array([[b"\xff"]], dtype=object)}, ["predict"])
    with pytest.raises(FailedPrecondition, match="write `input` and `output` into its configuration"):
        completed_tensors("sklearn", placed(tmp_path, saved(created), "model.skops"))


def test_values_that_scikit_learn_refuses_are_the_callers_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    created = LogisticRegression().fit(ROWS, LABELS)
    instance = open_instance(configured("sklearn", INPUT), placed(tmp_path, saved(created), "model.skops"))
    with pytest.raises(
        InvalidArgument, match=r"does not accept the values of these inputs: 'input' \[1, 4\]"
    ) as caught:
        instance.compute({"input": np.full((1, 4), np.nan)}, ["predict"])
    assert "contains NaN" in caplog.text and "contains NaN" not in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"does not accept inputs of these shapes: 'input' \[1, 3\]"):
        instance.compute({"input": np.zeros((1, 3))}, ["predict"])
    assert instance.compute({"input": np.zeros((0, 4))}, ["predict"])["predict"].shape == (0, 1)


def test_an_instance_takes_one_thread(tmp_path: Path) -> None:
    assert forest().n_jobs == 2
    instance = open_instance(configured("sklearn", INPUT), placed(tmp_path, saved(forest()), "model.skops"))
    assert instance._model.n_jobs == 1
    config = configured("sklearn", INPUT, parameters={"intra_op_thread_count": "2"})
    assert open_instance(config, placed(tmp_path, saved(forest()), "model.skops"))._model.n_jobs == 2


@pytest.mark.parametrize("filename", ["model.pkl", "model.pickle", "model.joblib"])
def test_pickles_are_refused_unopened(tmp_path: Path, filename: str) -> None:
    canary = tmp_path / "canary"
    files = placed(tmp_path, poisoned_pickle(canary), filename)
    for named in ("", filename):
        with pytest.raises(InvalidArgument, match=rf"'{filename}' is a pickle.*skops.io.dump\(model, 'model.skops'\)"):
            open_instance(configured("sklearn", INPUT, default_model_filename=named), files)
    (files.version_folder / "model.skops").write_bytes(poisoned_pickle(canary))
    with pytest.raises(InvalidArgument, match="skops cannot read 'model.skops'"):
        open_instance(configured("sklearn", INPUT), files)
    assert not canary.exists()


def rewritten(content: bytes, change: Any, extra: dict[str, bytes] | None = None) -> bytes:
    """A skops file with another schema."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "schema.json":
                schema = json.loads(data)
                change(schema)
                data = json.dumps(schema).encode()
            new.writestr(name, data)
        for name, data in (extra or {}).items():
            new.writestr(name, data)
    return buffer.getvalue()


def function(module: str, name: str) -> dict[str, Any]:
    return {"__class__": name, "__module__": module, "__loader__": "FunctionNode", "__id__": 999_999}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("builtins", "eval"),
        ("numpy", "load"),
        ("numpy.testing", "rundocs"),
        ("sklearn.utils", "shuffle"),
    ],
)
def test_a_function_from_the_file_is_never_called(tmp_path: Path, module: str, name: str) -> None:
    canary = tmp_path / "canary"

    def change(schema: dict[str, Any]) -> None:
        schema["content"]["content"]["func"] = function(module, name)
        words = schema["content"]["content"]["kw_args"]
        assert words is not None

    content = rewritten(saved(FunctionTransformer(np.log1p).fit(ROWS)), change)
    files = placed(tmp_path, content, "model.skops")
    with pytest.raises(InvalidArgument, match=rf"needs types that are not trusted: '{module}\.{name}'"):
        open_instance(configured("sklearn", INPUT), files)
    trusting = configured("sklearn", INPUT, parameters={"trusted_types": f"{module}.{name}"})
    with pytest.raises(InvalidArgument, match=rf"trusted_types of model 'test' names '{module}\.{name}', which is no"):
        open_instance(trusting, files)
    assert not canary.exists()


def test_a_type_from_elsewhere_is_not_built(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    def change(schema: dict[str, Any]) -> None:
        argument = {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "is_json": True}
        content = {"__class__": "tuple", "__module__": "builtins", "__loader__": "TupleNode"}
        content["content"] = [{**argument, "content": json.dumps(str(canary))}]  # type: ignore[assignment]
        schema["content"]["content"]["func"] = {
            "__class__": "mkdir",
            "__module__": os.mkdir.__module__,
            "__loader__": "ConstructorFromReduceNode",
            "content": content,
        }

    content = rewritten(saved(FunctionTransformer(np.log1p).fit(ROWS)), change, {"model.pkl": poisoned_pickle(canary)})
    with pytest.raises(InvalidArgument, match="not trusted: 'posix.mkdir'.*serve it with the python backend"):
        open_instance(configured("sklearn", INPUT), placed(tmp_path, content, "model.skops"))
    assert not canary.exists()


def test_classes_of_scikit_learn_can_be_trusted_by_the_configuration(tmp_path: Path) -> None:
    for made in (
        KNeighborsClassifier(3, algorithm="kd_tree").fit(ROWS, LABELS),
        IsotonicRegression().fit(ROWS[:, 0], LABELS),
    ):
        files = placed(tmp_path, saved(made), "model.skops")
        inputs = {"input": (FP64, (made.n_features_in_ if hasattr(made, "n_features_in_") else 1,))}
        parameters: dict[str, str] = {}
        unknown = skops_io.get_untrusted_types(file=files.version_folder / "model.skops")
        if unknown:
            with pytest.raises(
                InvalidArgument, match=r"not trusted.*If you made the file yourself, write .*trusted_types"
            ):
                open_instance(configured("sklearn", inputs), files)
            parameters = {"trusted_types": ", ".join(unknown)}
        rows = np.abs(ROWS[:3, : inputs["input"][1][0]]) / 9
        answer = open_instance(configured("sklearn", inputs, parameters=parameters), files).compute(
            {"input": rows}, ["predict"]
        )
        np.testing.assert_allclose(answer["predict"][:, 0], made.predict(rows))


def test_a_vectoriser_that_opens_files_is_refused(tmp_path: Path) -> None:
    created = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["a good", "a bad"], [0, 1])
    created[0].input = "filename"
    config = configured("sklearn", {"text": (BYTES, (1,))}, {"predict": (INT64, (1,))})
    with pytest.raises(InvalidArgument, match="TfidfVectorizer that opens the files its input names"):
        open_instance(config, placed(tmp_path, saved(created), "model.skops"))


def test_an_object_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no model in it, but a dict"):
        open_instance(configured("sklearn", INPUT), placed(tmp_path, saved({"model": LABELS}), "model.skops"))


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.tabular.sklearn._SMALL", 1 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", b" " * (1 << 24))
    with pytest.raises(InvalidArgument, match="skops cannot read"):
        open_instance(configured("sklearn", INPUT), placed(tmp_path, buffer.getvalue(), "model.skops"))


@pytest.mark.parametrize(("field", "number"), [("left_child", 10**6), ("right_child", 0), ("feature", 4)])
def test_a_tree_with_an_index_out_of_range_is_refused(tmp_path: Path, field: str, number: int) -> None:
    tree = DecisionTreeClassifier().fit(ROWS, LABELS)
    state = tree.tree_.__getstate__()
    state["nodes"][field][0] = number
    tree.tree_.__setstate__(state)
    with pytest.raises(InvalidArgument):
        open_instance(configured("sklearn", INPUT), placed(tmp_path, saved(tree), "model.skops"))


BROKEN_TREES = """
import sys
import logging; logging.disable()
import numpy as np, skops.io
from pathlib import Path
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, GradientBoostingClassifier
from sklearn.tree import DecisionTreeClassifier
from tabular_models import *
from headrace.core.errors import InvalidArgument
from headrace.core.dtypes import FP64
rows = np.random.default_rng(1).standard_normal((120, 4))
labels = (rows[:, 0] > 0).astype(int)
refused = 0
boosted = GradientBoostingClassifier(n_estimators=3), HistGradientBoostingClassifier(max_iter=3)
for model in (DecisionTreeClassifier(), RandomForestClassifier(3), *boosted):
    model.fit(rows, labels)
    for where, number in (("left", 10**6), ("right", 0), ("feature", 4), ("feature", 10**6)):
        if hasattr(model, "_predictors"):
            nodes = model._predictors[0][0].nodes
            names = {"left": "left", "right": "right", "feature": "feature_idx"}
        else:
            first = model if hasattr(model, "tree_") else np.ravel(model.estimators_)[0]
            state = first.tree_.__getstate__()
            nodes = state["nodes"]
            names = {"left": "left_child", "right": "right_child", "feature": "feature"}
        kept = nodes[0].copy()
        nodes[names[where]][0] = number
        if not hasattr(model, "_predictors"):
            first.tree_.__setstate__(state)
        files = placed(Path(sys.argv[1]), skops.io.dumps(model), "model.skops")
        try:
            open_instance(configured("sklearn", {"input": (FP64, (4,))}), files)
        except InvalidArgument:
            refused += 1
        nodes[0] = kept
        if not hasattr(model, "_predictors"):
            first.tree_.__setstate__(state)
    files = placed(Path(sys.argv[1]), skops.io.dumps(model), "model.skops")
    open_instance(configured("sklearn", {"input": (FP64, (4,))}), files)
print("refused", refused)
"""


@pytest.mark.slow  # quick: the one above
def test_trees_with_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    ended = in_a_process(BROKEN_TREES, str(tmp_path))
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["16"]), ended.stderr[-2000:]
