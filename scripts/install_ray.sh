#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ray Serve, for the tests marked `ray`: an environment of its own, build/ray, with this Headrace in it. A second time does nothing.
#
# Not into .venv: Ray is large, and only these tests need it. What .venv has, PyTorch for one, is found after what Ray brings.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/ray
ray=2.60.0

[ "$(cat "$folder/.version" 2>/dev/null)" = "$ray" ] && exit
rm -rf "$folder"
bash scripts/make_venv.sh .venv/bin/python "$folder"
"$folder/bin/python" -m pip install --quiet "ray[serve]==$ray" 'aiohttp>=3.10' 'starlette>=0.46'
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
  pwd
} >"$packages/headrace_test.pth"
echo "$ray" >"$folder/.version"
