#!/usr/bin/env bash
# Two hosts on one Linux machine, as root: network namespaces that see each other over one cable, each with a host name and
# a /dev/shm of its own. Tries what runs on several nodes, and what happens when one goes away, without a second machine.
#   bash scripts/two_hosts.sh run 'torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d
#     --rdzv-endpoint host0:29500 --rdzv-id 1 pretrain_gpt.py ...'     # the same command on both, then all is removed
#   bash scripts/two_hosts.sh up | on 0 COMMAND | on 1 COMMAND | unplug | plug | down      # step by step
set -euo pipefail
up() {
  for n in 0 1; do
    ip netns add "megapipe$n"
    ip -n "megapipe$n" link set lo up
  done
  ip link add cable0 netns megapipe0 type veth peer name cable1 netns megapipe1
  for n in 0 1; do
    ip -n "megapipe$n" addr add "10.77.0.$((n + 1))/24" dev "cable$n"
    ip -n "megapipe$n" link set "cable$n" up
  done
}

down() {
  for n in 0 1; do
    [ ! -e "/run/netns/megapipe$n" ] || ip netns del "megapipe$n"
  done
}

on() { # a host's number and a command of its shell; all of it ends with this process, as a machine does
  export NODE_RANK="$1" GLOO_SOCKET_IFNAME="cable$1" NCCL_SOCKET_IFNAME="cable$1" TP_SOCKET_IFNAME="cable$1"
  # shellcheck disable=SC2016  # the host expands it
  exec ip netns exec "megapipe$1" unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc bash -c \
    'mount -t tmpfs none /dev/shm && hostname "host$NODE_RANK" && printf "%s\n" >/dev/shm/hosts \
      "127.0.0.1 localhost" "10.77.0.1 host0" "10.77.0.2 host1" && mount --bind /dev/shm/hosts /etc/hosts && eval "$1"' \
    host "$2"
}

case "${1:-}" in
up | down) "$1" ;;
on) on "$2" "$3" ;;
unplug) ip -n megapipe1 link set cable1 down ;;
plug) ip -n megapipe1 link set cable1 up ;;
run)
  trap down EXIT
  up
  on 1 "$2" 2>&1 | sed 's/^/host1: /' &
  other=$!
  code=0
  on 0 "$2" 2>&1 | sed 's/^/host0: /' || code=$?
  wait "$other" || code=$?
  exit "$code"
  ;;
*)
  sed -n '2,7p' "$0"
  exit 2
  ;;
esac
