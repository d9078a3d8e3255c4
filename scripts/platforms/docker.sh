#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Docker engine of the tests' own, beside none: `docker.sh install`, `docker.sh start DIR`, `docker.sh stop DIR`.
# Everything of it lies under DIR, and DIR/docker.sock is where it listens. `stop` also takes back what an engine leaves
# in the kernel: bridges, iptables rules and policies, ip_forward, cgroups.
set -euo pipefail

TABLES=(filter nat)

install() {
  local missing=() package
  for package in docker.io iptables iproute2; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" != 0 ]; then
    echo "install these first: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  if [ -d /run/systemd/system ]; then
    systemctl disable --now docker.service docker.socket containerd.service >/dev/null 2>&1 || true
  fi
}

bridges() { ip -o link show type bridge | awk -F': ' '{print $2}' | cut -d@ -f1 | sort; }
cgroups() { find /sys/fs/cgroup -mindepth 1 -maxdepth 2 -type d -name docker 2>/dev/null | sort; }
rules() { iptables -w 10 -t "$1" -S 2>/dev/null || true; }

remember() {
  local table
  bridges >"$1/bridges"
  cgroups >"$1/cgroups"
  cat /proc/sys/net/ipv4/ip_forward >"$1/ip_forward"
  for table in "${TABLES[@]}"; do rules "$table" >"$1/rules.$table"; done
  local path
  for path in /etc/docker /etc/docker/key.json /run/docker /run/containerd /var/lib/docker /opt/containerd /opt/containerd/bin /opt/containerd/lib; do
    [ -e "$path" ] && echo "$path"
  done >"$1/paths" || true
}

start() {
  local dir=$1
  mkdir -p "$dir"
  dir=$(cd "$dir" && pwd)
  if [ -e "$dir/docker.sock" ]; then
    echo "an engine was started in $dir before: stop it first" >&2
    exit 1
  fi
  if pgrep -x dockerd >/dev/null; then
    echo "another Docker engine runs on this machine, and two would share bridges and rules: stop it first" >&2
    exit 1
  fi
  # A docker0 without an engine is what one that was killed has left.
  ip link delete docker0 2>/dev/null || true
  mkdir -p "$dir/before"
  remember "$dir/before"
  # Not a word of this script's own output may stay open in the engine, or whoever reads it waits for the engine's end.
  setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/dockerd.pid" \
    -H "unix://$dir/docker.sock" >"$dir/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 1 1200); do
    if DOCKER_HOST=unix://$dir/docker.sock docker info >/dev/null 2>&1; then return 0; fi
    if ! kill -0 $! 2>/dev/null; then break; fi
    sleep 0.1
  done
  tail -n 20 "$dir/dockerd.log" >&2
  stop "$dir"
  echo "the engine did not come up" >&2
  exit 1
}

forget_rules() {
  local table=$1 before=$2 line
  rules "$table" | { grep -Fvx -f <(cat "$before"; echo "-") || true; } >"$before.new"
  { grep '^-A' "$before.new" || true; } | while read -r line; do
    xargs iptables -w 10 -t "$table" <<<"-D ${line#-A }" || true
  done
  { grep '^-N' "$before.new" || true; } | while read -r _ line; do iptables -w 10 -t "$table" -X "$line" || true; done
  { grep '^-P' "$before" || true; } | while read -r line; do xargs iptables -w 10 -t "$table" <<<"$line" || true; done
  if [ ! -s "$before" ]; then
    { grep '^-P' "$before.new" || true; } | while read -r _ line _; do iptables -w 10 -t "$table" -P "$line" ACCEPT || true; done
  fi
}

stop() {
  local dir=$1 pid table name
  # Written last of what is remembered: without it nothing was started here, and what there is, is another's.
  [ -e "$dir/before/paths" ] || return 0
  dir=$(cd "$dir" && pwd)
  if pid=$(cat "$dir/dockerd.pid" 2>/dev/null) && grep -q "$dir/data" "/proc/$pid/cmdline" 2>/dev/null; then
    kill "$pid"
    for _ in $(seq 1 300); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
  fi
  { grep -F "$dir/" /proc/self/mounts || true; } | awk '{print $2}' | sort -r | while read -r name; do umount -l "$name" || true; done
  bridges | { grep -Fvx -f "$dir/before/bridges" || true; } | { grep -E '^(docker0|br-[0-9a-f]{12})$' || true; } |
    while read -r name; do ip link delete "$name" || true; done
  for table in "${TABLES[@]}"; do forget_rules "$table" "$dir/before/rules.$table"; done
  cat "$dir/before/ip_forward" >/proc/sys/net/ipv4/ip_forward
  cgroups | { grep -Fvx -f "$dir/before/cgroups" || true; } | while read -r name; do
    find "$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
  grep -qx /etc/docker/key.json "$dir/before/paths" || rm -f /etc/docker/key.json
  for name in /etc/docker /run/docker/plugins /run/docker /run/containerd/s /run/containerd /var/lib/docker /opt/containerd/bin /opt/containerd/lib /opt/containerd; do
    if [ -d "$name" ] && ! grep -qx "$name" "$dir/before/paths"; then rmdir "$name" 2>/dev/null || true; fi
  done
  rm -rf "$dir/data" "$dir/exec" "$dir/dockerd.pid" "$dir/docker.sock" "$dir/before"
}

case "${1:-}" in
  install) install ;;
  start | stop) "$1" "${2:?which folder}" ;;
  *)
    echo "usage: docker.sh install | start DIR | stop DIR" >&2
    exit 2
    ;;
esac
