# SPDX-License-Identifier: Apache-2.0
"""Models of rows and columns: XGBoost, LightGBM and scikit-learn, each from a file that cannot carry code.

`xgboost`, `lightgbm` and `sklearn` are what the engine calls. Under them: `columns` lays inputs side by side, `forest` is
what the two libraries of trees share, `trees` holds a tree's indices against its size, and `xgboost_file`, `ubjson`,
`lightgbm_text` and `skops_file` read and check the files, because the libraries trust what they read. `remembering` and
`checked_files` see to it that a large file is checked once, and not at every load.
"""
