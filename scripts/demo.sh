#!/usr/bin/env bash
# demo.sh: what `make run` runs. Starts a daemon in a scratch directory, shows
# one sandbox from creation to removal, stops the daemon and removes every
# trace. The daemon gets network and mount namespaces of its own, so this
# machine's interfaces and firewall stay as they are. Needs root.
#
#   SANDBOXD_BIN  where the programs are; ../bin
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
bin=${SANDBOXD_BIN:-$here/../bin}
if [ "$(id -u)" != 0 ]; then
  echo "the daemon needs root; run: sudo make run" >&2
  exit 1
fi
if [ -z "${SANDBOXD_DEMO_ISOLATED:-}" ]; then
  SANDBOXD_DEMO_ISOLATED=1 exec "$here/isolate.sh" "$0" "$@"
fi

if [ -t 1 ]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
title() { printf '\n%s# %s%s\n' "$bold" "$*" "$plain"; }
try() { # shows a command as a user would type it, then runs it
  printf '%s$ sandbox %s%s\n' "$bold" "$*" "$plain"
  sandbox "$@"
}

scratch=$(mktemp -d /var/tmp/sandboxd-demo.XXXXXX)
chmod 711 "$scratch" # sandboxes' ids pass through the run directory
parent=/$(basename "$scratch")
export SANDBOX_HOST=unix://$scratch/run/sandboxd.sock
sandbox() { "$bin/sandbox" "$@"; }

daemon=
start() { # the daemon, until it answers
  "$bin/sandboxd" --config "$scratch/config.yaml" --state-dir "$scratch/state" --run-dir "$scratch/run" \
    --cgroup "$mode" --cgroup-parent "$parent" >> "$scratch/log" 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    sandbox version > /dev/null 2>&1 && return
    kill -0 "$daemon" 2> /dev/null || break
    sleep 0.1
  done
  echo "the daemon did not start" >&2
  exit 1
}
finish() {
  local rc=$?
  trap - EXIT
  if [ -n "$daemon" ]; then
    sandbox rm --all > /dev/null 2>&1 || true
    kill "$daemon" 2> /dev/null || true
    wait "$daemon" 2> /dev/null || true
  fi
  [ "$rc" = 0 ] || { echo "the daemon said:"; tail -n 40 "$scratch/log"; } >&2
  rmdir "/sys/fs/cgroup$parent" "/sys/fs/cgroup/unified$parent" 2> /dev/null || true
  rm -rf "$scratch"
  exit "$rc"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Limits are enforced wherever the kernel's cgroup v2 tree has the controllers.
mode=enforce
controllers=$(cat /sys/fs/cgroup/cgroup.controllers 2> /dev/null || true)
for c in cpu memory pids io; do
  case " $controllers " in *" $c "*) ;; *) mode=best-effort ;; esac
done
if [ $mode = best-effort ]; then
  echo "This machine's cgroup v2 tree lacks controllers (it has: ${controllers:-none at /sys/fs/cgroup})."
  echo "The daemon runs with --cgroup=best-effort: CPU, memory and process limits are NOT enforced here."
fi

title "a daemon in $scratch"
printf 'volume:\n  size: 1g\n' > "$scratch/config.yaml"
start
try version

title "a sandbox: its own host name, process 1, ids, rights and network"
try create --name demo --memory 256m --pids 64 --cpu 0.5 --disk 100m --net open
try exec demo -- hostname
try exec demo -- cat /proc/1/comm
echo "  (outside, process 1 is $(cat /proc/1/comm))"
try exec demo -- cat /proc/self/uid_map
echo "  (root inside is user $(sandbox exec demo -- awk '{print $2}' /proc/self/uid_map) outside, who owns nothing)"
try exec demo -- grep -e CapEff -e NoNewPrivs /proc/self/status
try exec demo -- ip -brief address

title "its files: written, read, and copied out"
try exec demo -- sh -c 'echo "written inside" > /root/note'
try exec demo -- cat /root/note
try cp demo:/root/note "$scratch/note"
cat "$scratch/note"

title "its limits, and what it has used"
try inspect demo
try stats demo

title "the daemon is killed with -9; the next one takes the sandbox over"
kill -9 "$daemon"
wait "$daemon" 2> /dev/null || true
start
try exec demo -- cat /root/note

title "exit codes pass through; every end has a reason"
rc=0
try run --rm --name short -- sh -c 'echo working; exit 7' || rc=$?
echo "exit code $rc"
try rm demo
try ls -a
