#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# make_venv.sh PYTHON FOLDER: a virtual environment with pip, also where Python was installed without ensurepip.
set -euo pipefail
python=$1
folder=$2
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Headrace needs Python 3.11 or newer; '$python' is $("$python" --version). Try: make PYTHON=python3.11" >&2
  exit 1
fi
if "$python" -c 'import ensurepip' 2>/dev/null; then
  "$python" -m venv "$folder"
else
  bootstrap=$(mktemp -d)
  trap 'rm -rf "$bootstrap"' EXIT
  "$python" -m pip install --quiet --target "$bootstrap" virtualenv
  PYTHONPATH=$bootstrap "$python" -m virtualenv --quiet "$folder"
fi
