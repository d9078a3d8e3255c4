#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian packages for the tests marked `platform`: load generators, and a curl that speaks HTTP/2.
set -euo pipefail
packages=(wrk nghttp2-client curl netcat-openbsd)
missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "install these first: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
