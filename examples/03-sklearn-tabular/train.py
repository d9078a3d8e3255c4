# SPDX-License-Identifier: Apache-2.0
"""Train a scikit-learn pipeline on a table of wines and save it with skops. Takes two seconds."""

from pathlib import Path

import skops.io
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

table, kinds = load_wine(return_X_y=True)  # 178 wines, 13 columns, 3 kinds; comes with scikit-learn
learn, ask, learn_kinds, ask_kinds = train_test_split(table, kinds, test_size=0.25, random_state=0)
pipeline = make_pipeline(StandardScaler(), RandomForestClassifier(n_estimators=20, random_state=0))
pipeline.fit(learn, learn_kinds)
print(f"right for {pipeline.score(ask, ask_kinds):.0%} of {len(ask)} wines it has not seen")

# skops writes what the pipeline is, not a program that makes it: a pickle would be one, and is never opened.
Path("build").mkdir(exist_ok=True)
skops.io.dump(pipeline, "build/wine.skops")
print("wrote build/wine.skops")
