#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ray Serve, for the tests marked `platform`: an environment of its own, with this Headrace in it.
#
#   scripts/platforms/ray.sh install     into build/ray; a second time does nothing
#
# Not into .venv: Ray is large, and only these tests need it. What .venv has, PyTorch for one, is found after what Ray brings.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/ray
ray=2.60.0

install() {
  [ "$(cat "$folder/.version" 2>/dev/null)" = "$ray" ] && return
  rm -rf "$folder"
  bash scripts/make_venv.sh .venv/bin/python "$folder"
  "$folder/bin/python" -m pip install --quiet "ray[serve]==$ray" 'aiohttp>=3.10' 'starlette>=0.46'
  local packages
  packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
    pwd
  } >"$packages/headrace_test.pth"
  echo "$ray" >"$folder/.version"
}

case "${1:-}" in
  install) install ;;
  *)
    echo "usage: $0 install" >&2
    exit 2
    ;;
esac
