#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Slurm of one node with four pretended GPUs, and an sshd on loopback, of the tests' own:
# `slurm.sh install`, `slurm.sh start DIR`, `slurm.sh stop DIR`. Everything of them lies under DIR: `slurm.conf`, and for ssh
# `ssh_port`, `client_key`, `known_hosts`. Neither a munged nor an sshd of the machine's own is touched.
# `slurm.sh start DIR 2` starts two nodes, n1 and n2: a slurmd each, on this machine.
set -euo pipefail

install() {
  local missing=() package
  for package in slurm-wlm munge openssh-server openssh-client; do
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
    for package in slurmctld slurmd munge ssh; do
      if [[ " ${missing[*]} " == *" $package"* || " ${missing[*]} " == *" slurm-wlm "* ]]; then
        systemctl disable --now "$package" >/dev/null 2>&1 || true
      fi
    done
  fi
}

# As many ports that nobody listens at just now, below those that the kernel gives to outgoing connections: any client could take one of these meanwhile.
free_ports() {
  python3 - "$1" <<'PYTHON'
import random, socket, sys
held = {}
while len(held) < int(sys.argv[1]):
    each, port = socket.socket(), random.randrange(19_000, 20_000)
    try:
        each.bind(("127.0.0.1", port))
        held[port] = each
    except OSError:
        each.close()
print(*held)
PYTHON
}

configure() {
  local dir=$1 controller=$2 name number nodes
  shift 2
  name=$(hostname -s)
  for number in 0 1 2 3; do mknod "$dir/gpu$number" c 1 3; done
  nodes=$(node_names "$#")
  : >"$dir/gres.conf"
  for number in $nodes; do echo "NodeName=$number Name=gpu File=$dir/gpu[0-3]" >>"$dir/gres.conf"; done
  # Eight processors and 8 GB for each node whatever the machine has: what tests count on.
  cat >"$dir/slurm.conf" <<CONF
ClusterName=headrace
SlurmctldHost=$name(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$controller
StateSaveLocation=$dir/spool/controller
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PropagateResourceLimits=NONE
KillWait=5
MinJobAge=300
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
CONF
  for number in $nodes; do
    echo "NodeName=$number NodeHostname=$name NodeAddr=127.0.0.1 Port=$1 CPUs=8 RealMemory=8000 Gres=gpu:4 State=UNKNOWN"
    shift
  done >>"$dir/slurm.conf"
  echo "PartitionName=main Nodes=${nodes// /,} Default=YES MaxTime=INFINITE State=UP" >>"$dir/slurm.conf"
}

# One node has the name of the machine.
node_names() {
  local number names=()
  [ "$1" = 1 ] && hostname -s && return
  for number in $(seq "$1"); do names+=("n$number"); done
  echo "${names[*]}"
}

configure_ssh() {
  local dir=$1 port=$2
  # A home of its own: what the user's shell reads at its start may take longer than the commands.
  mkdir "$dir/home"
  ssh-keygen -q -t ed25519 -N "" -f "$dir/host_key"
  ssh-keygen -q -t ed25519 -N "" -f "$dir/client_key"
  cp "$dir/client_key.pub" "$dir/authorized_keys"
  echo "[127.0.0.1]:$port $(cut -d' ' -f1,2 "$dir/host_key.pub")" >"$dir/known_hosts"
  echo "$port" >"$dir/ssh_port"
  cat >"$dir/sshd_config" <<CONF
Port $port
ListenAddress 127.0.0.1
HostKey $dir/host_key
PidFile $dir/sshd.pid
AuthorizedKeysFile $dir/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PrintMotd no
MaxStartups 100
SetEnv SLURM_CONF=$dir/slurm.conf HOME=$dir/home
CONF
}

start() {
  local dir=$1 count=${2:-1} controller ssh node
  local -a ports
  mkdir -p -m 700 "$dir"
  dir=$(cd "$dir" && pwd)
  if [ -e "$dir/slurm.conf" ]; then
    echo "a Slurm was started in $dir before: stop it first" >&2
    exit 1
  fi
  if [ "$(id -u)" != 0 ]; then
    echo "Slurm of the tests needs root: its daemons start jobs as their users" >&2
    exit 1
  fi
  mkdir -p "$dir/spool/controller" "$dir/log"
  for node in $(node_names "$count"); do mkdir -p "$dir/spool/$node"; done
  read -r -a ports < <(free_ports $((count + 2)))
  controller=${ports[0]} ssh=${ports[1]}
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
  configure "$dir" "$controller" "${ports[@]:2}"
  configure_ssh "$dir" "$ssh"
  # Not a word of this script's own output may stay open in a daemon, or whoever reads it waits for the daemon's end.
  setsid munged --force --foreground --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --seed-file="$dir/munge.seed" --log-file="$dir/log/munged.log" >"$dir/log/munged.out" 2>&1 </dev/null &
  for _ in $(seq 1 1200); do [ -S "$dir/munge.socket" ] && break; sleep 0.05; done
  export SLURM_CONF=$dir/slurm.conf
  setsid slurmctld -D >"$dir/log/slurmctld.out" 2>&1 </dev/null &
  for node in $(node_names "$count"); do
    setsid slurmd -D -N "$node" >"$dir/log/slurmd-$node.out" 2>&1 </dev/null &
  done
  [ -d /run/sshd ] || { mkdir -p /run/sshd && touch "$dir/made_run_sshd"; }
  /usr/sbin/sshd -f "$dir/sshd_config" -E "$dir/log/sshd.log" </dev/null >/dev/null 2>&1
  for _ in $(seq 1 1200); do
    if [ "$(sinfo -h -N -o %t 2>/dev/null | grep -c '^idle$')" = "$count" ]; then return 0; fi
    sleep 0.1
  done
  tail -n 20 "$dir"/log/* >&2
  stop "$dir"
  echo "Slurm did not come up" >&2
  exit 1
}

# A zombie that nobody takes note of is dead.
lives() { grep -qsE '^State:[[:space:]]+[^ZX[:space:]]' "/proc/$1/status"; }

# End the process that a pid file names, if it is ours: its command line or its environment names the folder.
end() {
  local dir=$1 file=$2 pid
  pid=$(cat "$dir/$file" 2>/dev/null) || return 0
  grep -qsF "$dir/" "/proc/$pid/cmdline" "/proc/$pid/environ" || return 0
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 1 100); do lives "$pid" || return 0; sleep 0.05; done
  kill -9 "$pid" 2>/dev/null || true
}

stop() {
  local dir=$1 daemon
  [ -e "$dir/slurm.conf" ] || return 0
  dir=$(cd "$dir" && pwd)
  export SLURM_CONF=$dir/slurm.conf
  timeout 10 scancel --full --signal=KILL --user="$(id -un)" 2>/dev/null || true
  timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
  for _ in $(seq 1 100); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
  for daemon in "$dir"/sshd.pid "$dir"/slurmd-*.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
    end "$dir" "$(basename "$daemon")"
  done
  # Every sshd of the machine needs that folder.
  if [ -e "$dir/made_run_sshd" ] && ! pgrep -x sshd -r R,S,D >/dev/null; then rmdir /run/sshd 2>/dev/null || true; fi
  rm -rf "$dir/spool" "$dir/log" "$dir/home" "$dir"/gpu? "$dir"/*.pid "$dir"/*_key "$dir"/*_key.pub "$dir"/munge* \
    "$dir"/{slurm.conf,gres.conf,sshd_config,authorized_keys,known_hosts,ssh_port,made_run_sshd}
}

case "${1:-}" in
  install) install ;;
  start | stop) "$1" "${2:?which folder}" "${3:-1}" ;;
  *)
    echo "usage: slurm.sh install | start DIR [NODES] | stop DIR" >&2
    exit 2
    ;;
esac
