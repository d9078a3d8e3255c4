#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real Kubernetes API for tests: etcd, kube-apiserver and kube-controller-manager on loopback; no kubelet, no scheduler.
#
#   kubernetes.sh install     packages, and the servers built from Debian's source into ~/.cache/headrace (6 to 10
#                             minutes, once; nothing is done where they are there, also by another clone's call)
#   kubernetes.sh start DIR   start all three on free ports, with their state under DIR; DIR/kubeconfig is the
#                             administrator's, DIR/bin has kubectl
#   kubernetes.sh stop DIR    end them; DIR stays, for its logs
#   kubernetes.sh bin         print the folder of the programs, among them those of a node for kubernetes_node.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/kubernetes
version=1.20.2
# What is built depends on this recipe alone, so clones share it.
recipe=$(cat "$here/kubernetes.sh" "$here/patch120.py" | sha256sum | cut -c1-12)
kept=${XDG_CACHE_HOME:-${HOME:-$root/build}/.cache}/headrace/kubernetes-$version-$(uname -m)-$recipe
bin=$kept/bin
commands=(kube-apiserver kube-controller-manager kubectl kube-scheduler kubelet kube-proxy)

packages() {
  local missing=()
  for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" != 0 ]; then
    echo "install these first: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=600 \
    "${missing[@]}" >/dev/null
}

# The source entries of the same archive, with lists of their own: the machine's own entries stay as they are.
fetch_source() {
  mkdir -p "$1/lists/partial"
  sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$1/debian.sources"
  local own=(-o "Dir::Etc::sourcelist=$1/debian.sources" -o "Dir::Etc::sourceparts=-" -o "Dir::State::lists=$1/lists"
    -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o "APT::Sandbox::User=root")
  (cd "$1" && apt-get "${own[@]}" update -qq && apt-get "${own[@]}" source -qq --download-only kubernetes &&
    dpkg-source --no-check -x kubernetes_1.20.5+really"$version"-*.dsc source >/dev/null)
}

# The generated OpenAPI definitions are not in the archive.
generate_openapi() {
  [ -f pkg/generated/openapi/zz_generated.openapi.go ] && return
  go build -o "$1/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
  local folders
  folders=$({
    grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin 2>/dev/null
    (cd staging/src && grep -rl --include='*.go' '+k8s:openapi-gen=' k8s.io) |
      grep -Ev '^k8s.io/(code-generator|sample-apiserver)/' | sed 's#^#vendor/#'
  } | grep -v _test.go | xargs -n1 dirname | LC_ALL=C sort -u | grep -v /_examples | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
  "$1/openapi-gen" --logtostderr -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$1/openapi-violations.txt"
}

build_servers() (
  local work=$1
  local source=$work/source
  # reflect2 as vendored crashes the server on its first custom resource with Go 1.18 and later; Debian's does not.
  local vendored=$source/vendor/github.com/modern-go/reflect2 packaged=/usr/share/gocode/src/github.com/modern-go/reflect2
  rm -f "$vendored"/*.go "$vendored"/*.s
  cp -L "$packaged"/*.go "$packaged"/*.s "$vendored/"
  rm -f "$vendored"/*_test.go
  python3 "$here/patch120.py" "$source"
  cd "$source"
  mkdir -p .go/src/k8s.io
  ln -sfn ../../.. .go/src/k8s.io/kubernetes
  export GO111MODULE=off GOPATH=$PWD/.go GOFLAGS='' GOCACHE=$work/cache CGO_ENABLED=0
  cd .go/src/k8s.io/kubernetes
  generate_openapi "$work"
  local flags="-s -w"
  for name in component-base/version client-go/pkg/version; do
    local in=k8s.io/kubernetes/vendor/k8s.io/$name
    flags="$flags -X $in.gitVersion=v$version -X $in.gitMajor=1 -X $in.gitMinor=20 -X $in.gitTreeState=clean -X $in.gitCommit=debian"
  done
  mkdir -p "$bin"
  # Clouds and Docker are a third of what would be compiled, and are not used.
  for command in "${commands[@]}"; do
    go build -tags providerless,dockerless -trimpath -ldflags="$flags" -o "$work/$command" "k8s.io/kubernetes/cmd/$command"
    mv "$work/$command" "$bin/.$command" # from another file system, perhaps
    mv "$bin/.$command" "$bin/$command"
  done
)

built() {
  local command
  for command in "${commands[@]}"; do
    [ -x "$bin/$command" ] || return 1
  done
}

install() {
  packages etcd-server openssl curl
  built && return
  packages golang-go dpkg-dev golang-github-modern-go-reflect2-dev
  mkdir -p "$build" "$kept"
  exec 9>"$kept/lock"
  flock 9 # another call may be building
  built && return
  echo "building Kubernetes $version: 6 to 10 minutes, this once" >&2
  rm -rf "$build/work"
  mkdir -p "$build/work"
  fetch_source "$build/work"
  build_servers "$build/work"
  chmod -R u+w "$build/work"
  rm -rf "$build/work"
}

free_ports() {
  python3 -c 'import socket, sys
found = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in found: each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in found))' "$1"
}

# run DIR NAME WORDS...: in a session of its own, with its log and its pid under DIR.
run() {
  local dir=$1 name=$2
  shift 2
  setsid nohup "$@" >"$dir/$name.log" 2>&1 </dev/null &
  echo $! >"$dir/$name.pid"
}

alive() {
  kill -0 "$(cat "$1/$2.pid")" 2>/dev/null
}

start() {
  local dir client peer api manager
  mkdir -p "$1"
  dir=$(cd "$1" && pwd)
  chmod 700 "$dir"
  built || { echo "run $0 install first" >&2; exit 1; }
  read -r client peer api manager <<<"$(free_ports 4)"
  ln -sfn "$bin" "$dir/bin"
  openssl genrsa -out "$dir/sa.key" 2048 2>/dev/null
  openssl rsa -in "$dir/sa.key" -pubout -out "$dir/sa.pub" 2>/dev/null
  printf '%s\n' 'admintoken,admin,admin-uid,"system:masters"' 'nobodytoken,nobody,nobody-uid' >"$dir/tokens.csv"
  run "$dir" etcd etcd --data-dir "$dir/etcd" --unsafe-no-fsync --listen-client-urls "http://127.0.0.1:$client" \
    --advertise-client-urls "http://127.0.0.1:$client" --listen-peer-urls "http://127.0.0.1:$peer" \
    --initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer"
  # A loopback address cannot be advertised; and with no kubelet there is nobody who would mount a service account's token.
  # shellcheck disable=SC2086 # KUBERNETES_APISERVER_FLAGS: words
  run "$dir" apiserver "$bin/kube-apiserver" --etcd-servers="http://127.0.0.1:$client" --bind-address=127.0.0.1 \
    --endpoint-reconciler-type=none --secure-port="$api" --cert-dir="$dir/certs" --token-auth-file="$dir/tokens.csv" \
    --authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/20 --service-account-key-file="$dir/sa.pub" \
    --service-account-signing-key-file="$dir/sa.key" --service-account-issuer=https://kubernetes.default.svc \
    --disable-admission-plugins=ServiceAccount --allow-privileged=true ${KUBERNETES_APISERVER_FLAGS:-}
  cat >"$dir/kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$api", certificate-authority: "$dir/certs/apiserver.crt"}}]
users: [{name: u, user: {token: admintoken}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
END
  local tries=0
  until [ "$(curl -sk -m2 -H 'Authorization: Bearer admintoken' "https://127.0.0.1:$api/readyz")" = ok ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 480 ] || ! alive "$dir" apiserver || ! alive "$dir" etcd; then
      tail -n 5 "$dir/etcd.log" "$dir/apiserver.log" >&2
      stop "$dir"
      exit 1
    fi
    sleep 0.25
  done
  run "$dir" manager "$bin/kube-controller-manager" --kubeconfig="$dir/kubeconfig" --leader-elect=false \
    --service-account-private-key-file="$dir/sa.key" --bind-address=127.0.0.1 --port=0 --secure-port="$manager" \
    --cert-dir="$dir/certs" --concurrent-gc-syncs=4 \
    --controllers=deployment,replicaset,statefulset,daemonset,job,cronjob,garbagecollector,namespace,endpoint,endpointslice,serviceaccount,disruption,horizontalpodautoscaling
}

stop() {
  local dir
  dir=$(cd "$1" && pwd)
  for name in manager apiserver etcd; do
    [ -f "$dir/$name.pid" ] || continue
    local pid
    pid=$(cat "$dir/$name.pid")
    # The number may be another's by now; ours has its folder among its words.
    if tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "$dir/"; then
      kill -KILL "$pid" 2>/dev/null || true
      while [ -d "/proc/$pid" ] && ! grep -q '^State:.*Z' "/proc/$pid/status" 2>/dev/null; do sleep 0.05; done
    fi
    rm -f "$dir/$name.pid"
  done
}

case ${1:-} in
  install) install ;;
  start) start "${2:?a folder}" ;;
  stop) stop "${2:?a folder}" ;;
  bin) echo "$bin" ;;
  *)
    sed -n '3,11p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
