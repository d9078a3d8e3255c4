#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# NVIDIA's own clients of the TAO API from PyPI, for the tests marked `platform`: each into a folder of its own, without what
# they depend on (the tests' environment has that).
#
#   scripts/platforms/tao_clients.sh install     into build/tao_clients; a second time does nothing
#
# v1: the last command line that speaks /api/v1. v2: tao_sdk and the command line that speak /api/v2.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/tao_clients

install() { # name version
  [ "$(cat "$folder/$1/.version" 2>/dev/null)" = "$2" ] && return
  rm -rf "${folder:?}/$1"
  .venv/bin/python -m pip install --quiet --no-deps --target "$folder/$1" "nvidia-tao-client==$2" "nvidia-tao-core==$2"
  echo "$2" >"$folder/$1/.version"
}

case "${1:-}" in
  install)
    install v1 6.25.9
    install v2 6.26.3
    ;;
  *)
    echo "usage: $0 install" >&2
    exit 2
    ;;
esac
