#!/usr/bin/env bash
# A Slurm of one node on this machine, for tests: slurm.sh ACTION FOLDER, where ACTION is
# start, stop, node-dies, node (one again), controller-dies or controller (one again).
#
# Everything it needs and writes lies in FOLDER (a new, short path: sockets have at most 108
# letters); its own munge key, socket and free ports, so that it touches no other Slurm. `stop` ends
# what FOLDER/run names, and jobs that were started with this configuration, nothing else.
set -euo pipefail
action=$1 dir=$2
export SLURM_CONF="$dir/slurm.conf" PATH="$PATH:/usr/sbin:/sbin"
host=$(hostname -s)

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

configure() {
  mkdir -p "$dir"/{state,spool,run,log,munge}
  chmod 755 "$dir" "$dir/munge"
  (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
  cat >"$dir/gres.conf" <<END
AutoDetect=off
NodeName=$host Name=gpu File=/dev/null
NodeName=$host Name=gpu File=/dev/zero
END
  echo "CgroupPlugin=autodetect" >"$dir/cgroup.conf"
  cat >"$dir/slurm.conf" <<END
ClusterName=onebox
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=20
KillWait=30
InactiveLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=01:00:00 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 State=UP PriorityTier=9
END
}

controller() {
  slurmctld -D </dev/null >>"$dir/log/slurmctld.out" 2>&1 &
  echo $! >"$dir/run/controller"
}

node() {
  slurmd -D -N "$host" </dev/null >>"$dir/log/slurmd.out" 2>&1 &
  echo $! >"$dir/run/node"
  wait_for_node
}

wait_for_node() {
  for _ in $(seq 300); do
    case $(sinfo -h -o %T 2>/dev/null | head -1) in idle | mixed | allocated | completing) return ;; esac
    sleep 0.2
  done
  echo "the node did not come up:" >&2
  tail -n 20 "$dir"/log/*.log >&2
  exit 1
}

# The processes of this Slurm's jobs, by the environment they began with, and before them the steps
# that watch them, which would report their end.
jobs() {
  local own=() watchers=() parent
  for environ in /proc/[0-9]*/environ; do
    grep -qzx "SLURM_CONF=$SLURM_CONF" "$environ" 2>/dev/null || continue
    grep -qzE "^SLURM_JOB_ID=" "$environ" 2>/dev/null || continue
    pid=${environ#/proc/} pid=${pid%/environ}
    own+=("$pid")
    parent=$(awk '/^PPid:/ {print $2}' "/proc/$pid/status" 2>/dev/null || true)
    if [ "$(cat "/proc/$parent/comm" 2>/dev/null)" = slurmstepd ]; then watchers+=("$parent"); fi
  done
  echo "${watchers[@]}" "${own[@]}"
}

end() { # NAME SIGNAL
  [ -f "$dir/run/$1" ] || return 0
  pid=$(cat "$dir/run/$1")
  kill "-$2" "$pid" 2>/dev/null || true
  while kill -0 "$pid" 2>/dev/null && ! grep -q " Z " "/proc/$pid/stat" 2>/dev/null; do sleep 0.05; done
  rm -f "$dir/run/$1"
}

case $action in
start)
  configure
  munged -F --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" </dev/null >"$dir/log/munged.out" 2>&1 &
  echo $! >"$dir/run/munged"
  until [ -S "$dir/munge/socket" ]; do sleep 0.1; done
  controller
  node
  ;;
node) node ;;
node-dies) # as when its power is cut: nothing of it has a last word
  end node KILL
  jobs | xargs -r kill -KILL 2>/dev/null || true
  ;;
controller)
  controller
  wait_for_node
  ;;
controller-dies) end controller KILL ;;
stop)
  end node KILL
  jobs | xargs -r kill -KILL 2>/dev/null || true
  end controller TERM
  end munged TERM
  ;;
*)
  echo "$action is no action" >&2
  exit 2
  ;;
esac
