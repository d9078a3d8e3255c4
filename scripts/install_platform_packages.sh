#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian packages for the tests marked `platform`: load generators, a curl that speaks HTTP/2, jq, Prometheus, Redis, proxies,
# PostgreSQL.
set -euo pipefail
packages=(wrk nghttp2-client curl netcat-openbsd prometheus redis-server nginx-light haproxy postgresql jq)
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
  # The tests start their own; a package's service has no business here, unless it was here before.
  for service in prometheus redis-server nginx haproxy postgresql; do
    if [[ " ${missing[*]} " == *" $service"* && -d /run/systemd/system ]]; then
      systemctl disable --now "$service" >/dev/null 2>&1 || true
    fi
  done
fi
