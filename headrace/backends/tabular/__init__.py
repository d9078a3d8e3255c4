# SPDX-License-Identifier: Apache-2.0
"""Backends for tabular models: XGBoost, LightGBM and scikit-learn, each from a file format that cannot carry code.

`xgboost`, `lightgbm` and `sklearn` are the backends. `columns` turns inputs into a table, `forest` holds what the two
tree libraries share, and `xgboost_file`, `ubjson` and `lightgbm_file` read and check the files, because the libraries
trust what they read. `check_cache` makes sure that a large file is checked once, not at every load.
"""
