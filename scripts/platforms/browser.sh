#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A browser for the tests of the console, and what drives and judges it: Debian's Chromium, Playwright from PyPI, axe-core
# from npm.
#
#   browser.sh install     packages of Debian, and build/browser; a second time does nothing
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$root/build/browser
playwright=1.65.0
axe=4.10.3
axe_sha256=880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb

packages() {
  local missing=() package
  for package in chromium fonts-dejavu-core; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" != 0 ]; then
    echo "install these first: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Not into .venv: only these tests need it, and it is large.
drive() {
  [ "$(cat "$build/python/.version" 2>/dev/null)" = "$playwright" ] && return
  rm -rf "$build/python"
  "$root/.venv/bin/python" -m pip install --quiet --target "$build/python" "playwright==$playwright"
  echo "$playwright" >"$build/python/.version"
}

judge() {
  [ -f "$build/axe-$axe.js" ] && return
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # now
  trap "rm -rf '$work'" EXIT
  # A package of npm is an archive under a known address: npm itself is not needed.
  "$root/.venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], sys.argv[2])' \
    "https://registry.npmjs.org/axe-core/-/axe-core-$axe.tgz" "$work/axe.tgz"
  tar -xzf "$work/axe.tgz" -C "$work" package/axe.min.js
  echo "$axe_sha256  $work/package/axe.min.js" | sha256sum --check --quiet
  mv "$work/package/axe.min.js" "$build/axe-$axe.js"
}

case ${1:-} in
  install)
    mkdir -p "$build"
    packages
    drive
    judge
    ;;
  *)
    sed -n '3,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
