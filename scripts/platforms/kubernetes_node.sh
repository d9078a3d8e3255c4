#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A whole Kubernetes cluster of one real node for tests: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet,
# kube-proxy, containerd with runc, and a small DNS server.
#
#   kubernetes_node.sh install    packages, and the servers of kubernetes.sh
#   kubernetes_node.sh run DIR    run it until standard input ends; DIR/kubeconfig is there when the API server answers
#
# The node has namespaces of its own (processes, mounts, network, host name): it ends as a whole with its first process, also when
# whoever started it is killed, and with it go its containers, mounts, bridges and iptables rules. Its cgroups are removed by `run`,
# or by the next `run` if that was killed, too.
#
# This machine reaches the node, its pods and its Services by routes over a pair of interfaces, hr-nodeN; nothing else does,
# and the node reaches nothing else.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
name=hr-node

install() {
  bash "$here/kubernetes.sh" install
  local missing=() package
  for package in containerd runc containernetworking-plugins iptables iproute2 conntrack; do
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
  if [ -d /run/systemd/system ]; then
    systemctl disable --now containerd.service >/dev/null 2>&1 || true
  fi
}

controllers() { awk '$3 ~ /^cgroup2?$/ {print $2}' /proc/self/mounts; }

cgroups() {
  local controller
  for controller in $(controllers); do find "$controller" -maxdepth 1 -name "$1"; done
}

# Those of nodes that have ended: an interface goes with its node, and one that lives keeps its empty cgroups.
remove_cgroups() {
  local path
  cgroups "$1" | while read -r path; do
    [ -e "/sys/class/net/$(basename "$path")" ] || find "$path" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
}

# Two nodes on one machine have different numbers: a link's name can be taken once.
add_link() {
  for number in $(seq 1 200); do
    ip link add "$name$number" type veth peer name "hr-end$number" 2>/dev/null && return
  done
  echo "no network interface can be made: root and the kernel's veth are needed" >&2
  exit 1
}

end() {
  set +e
  kill -KILL "$inner" 2>/dev/null
  wait 2>/dev/null
  ip link delete "$name$number" 2>/dev/null
  for _ in $(seq 1 100); do # the kernel ends the last processes on its own time
    remove_cgroups "$name$number"
    [ -z "$(cgroups "$name$number")" ] && break
    sleep 0.1
  done
}

run() {
  mkdir -p "$1"
  dir=$(cd "$1" && pwd)
  ln -sfn "$(bash "$here/kubernetes.sh" bin)" "$dir/bin"
  [ -x "$dir/bin/kubelet" ] || { echo "run $0 install first" >&2; exit 1; }
  remove_cgroups "$name*"
  add_link
  trap end EXIT
  trap 'exit 1' INT TERM HUP
  local controller
  for controller in $(controllers); do mkdir -p "$controller/$name$number"; done
  ip address add "10.77.$number.1/24" dev "$name$number"
  ip link set "$name$number" up
  # Standard input is what both live by: whichever notices its end first ends the node.
  exec 3<&0
  unshare --mount --net --pid --uts --ipc --fork --kill-child --mount-proc \
    bash "${BASH_SOURCE[0]}" node "$dir" "$number" <&3 >"$dir/node.log" 2>&1 &
  inner=$!
  until [ -e "$dir/first.pid" ] || ! kill -0 "$inner" 2>/dev/null; do sleep 0.05; done
  local first
  first=$(ps -o pid= --ppid "$inner" | tr -d ' ')
  ip link set "hr-end$number" netns "$first"
  ip route add "10.78.$number.0/24" via "10.77.$number.2"
  ip route add "10.79.$number.0/24" via "10.77.$number.2"
  while kill -0 "$inner" 2>/dev/null; do
    # read tells a time limit (more than 128) from the end of the input (1).
    IFS= read -r -t 1 -u 3 || [ $? -gt 128 ] || exit 0
  done
  tail -n 20 "$dir"/*.log >&2
  exit 1
}

# daemon NAME WORDS...: with its log under the folder; if it ends, the node ends.
daemon() {
  local log=$1
  shift
  "$@" >"$dir/$log.log" 2>&1 </dev/null &
}

wait_for() {
  local what=$1 tries=0
  shift
  until "$@" >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 1200 ]; then
      echo "no $what after five minutes" >&2
      exit 1
    fi
    sleep 0.25
  done
}

own_folders() {
  local path
  for path in var/lib var/log run mnt; do
    mkdir -p "$dir/$path"
    mount --bind "$dir/$path" "/$path"
  done
  mkdir -p /run/lock /var/lib/kubelet /var/lib/containerd /var/lib/etcd "$dir/cni"
  # In memory (about 1 GB): unpacking an image onto a busy disk takes minutes.
  mount -t tmpfs tmpfs /var/lib/containerd
  mount -t tmpfs tmpfs /var/lib/etcd
  mount --make-rshared /
  # What the kubelet would change for the whole machine: it finds what it wants, and changes files of ours.
  local setting
  for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    path=$dir/sysctl-$(basename "${setting%=*}")
    echo "${setting#*=}" >"$path"
    mount --bind "$path" "/proc/sys/${setting%=*}"
  done
}

own_network() {
  wait_for "network interface" ip link show "hr-end$number"
  ip link set lo up
  ip link set "hr-end$number" name eth0
  ip address add "$address/24" dev eth0
  ip link set eth0 up
  ip route add default via "10.77.$number.1"
  echo 1 >/proc/sys/net/ipv4/ip_forward
  # ptp and not bridge: between pods on one bridge, answers pass kube-proxy's rules only with a setting of the kernel.
  cat >"$dir/cni/10-pods.conflist" <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500,
   "ipam": {"type": "host-local", "subnet": "10.78.$number.0/24", "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
END
}

start_containerd() {
  cat >"$dir/containerd.toml" <<END
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/headrace-test/pause:1"
restrict_oom_score_adj = true
disable_tcp_service = true
tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$dir/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
END
  daemon containerd containerd --config "$dir/containerd.toml"
  wait_for containerd ctr --connect-timeout 1s version
}

start_api_server() {
  openssl genrsa -out "$dir/sa.key" 2048 2>/dev/null
  openssl rsa -in "$dir/sa.key" -pubout -out "$dir/sa.pub" 2>/dev/null
  printf '%s\n' 'admintoken,admin,admin-uid,"system:masters"' 'nobodytoken,nobody,nobody-uid' >"$dir/tokens.csv"
  daemon etcd etcd --data-dir /var/lib/etcd/data --unsafe-no-fsync
  daemon apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address="$address" \
    --advertise-address="$address" --secure-port=6443 --cert-dir="$dir/certs" --token-auth-file="$dir/tokens.csv" \
    --authorization-mode=RBAC --service-cluster-ip-range="10.79.$number.0/24" --service-account-key-file="$dir/sa.pub" \
    --service-account-signing-key-file="$dir/sa.key" --service-account-issuer=https://kubernetes.default.svc \
    --allow-privileged=true --kubelet-preferred-address-types=InternalIP
  cat >"$dir/kubeconfig.new" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$address:6443", certificate-authority: "$dir/certs/apiserver.crt"}}]
users: [{name: u, user: {token: admintoken}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
END
  wait_for "API server" "$bin/kubectl" --kubeconfig "$dir/kubeconfig.new" get --raw /readyz
}

node() {
  dir=$1 number=$2 bin=$1/bin address=10.77.$2.2
  hostname node1
  mount --make-rprivate /
  echo $$ >"$dir/first.pid"
  own_folders
  own_network
  start_containerd
  start_api_server
  local config=$dir/kubeconfig.new
  daemon manager "$bin/kube-controller-manager" --kubeconfig="$config" --leader-elect=false --port=0 --cert-dir="$dir/certs" \
    --service-account-private-key-file="$dir/sa.key" --root-ca-file="$dir/certs/apiserver.crt" --use-service-account-credentials=false \
    --node-monitor-period=2s --node-monitor-grace-period=16s --concurrent-gc-syncs=4
  daemon scheduler "$bin/kube-scheduler" --kubeconfig="$config" --leader-elect=false --port=0 --cert-dir="$dir/certs"
  daemon proxy "$bin/kube-proxy" --kubeconfig="$config" --proxy-mode=iptables --cluster-cidr="10.78.$number.0/24" \
    --hostname-override=node1 --bind-address="$address" --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 \
    --conntrack-tcp-timeout-close-wait=0 --iptables-min-sync-period=200ms
  echo >"$dir/resolv.conf"
  daemon kubelet "$bin/kubelet" --kubeconfig="$config" --hostname-override=node1 --node-ip="$address" --address="$address" \
    --container-runtime=remote --container-runtime-endpoint=unix:///run/containerd/containerd.sock --cgroup-driver=cgroupfs \
    --cgroup-root="/$name$number" --cert-dir="$dir/certs" --anonymous-auth=true --authorization-mode=AlwaysAllow \
    --fail-swap-on=false --eviction-hard=memory.available\<50Mi --image-gc-high-threshold=100 --max-pods=100 \
    --resolv-conf="$dir/resolv.conf" --cluster-dns="$address" --cluster-domain=cluster.local --node-status-update-frequency=4s \
    --volume-plugin-dir="$dir/volume-plugins" --registry-qps=0 --event-qps=0 --kube-api-qps=50 --kube-api-burst=100 --healthz-port=0 \
    --read-only-port=0
  daemon dns "${HEADRACE_TEST_PYTHON:-$root/.venv/bin/python}" "$root/tests/support/cluster_dns.py" "$config" "$address"
  ln "$config" "$dir/kubeconfig"
  # As the first process it is the parent of whatever loses its own; bash waits for these by itself.
  local started
  started=$(jobs -pr | wc -l)
  while IFS= read -r -t 1 || [ $? -gt 128 ]; do
    [ "$(jobs -pr | wc -l)" = "$started" ] || { echo "one of the node's programs has ended" >&2; exit 1; }
  done
}

case ${1:-} in
  install) install ;;
  run) run "${2:?a folder}" ;;
  node) node "$2" "$3" ;;
  *)
    sed -n '3,8p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
