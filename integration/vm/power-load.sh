#!/bin/sh
# power-load.sh prepare N | load | verify | crashes N
# What power.sh runs in the VM. Each line of load is something the daemon has
# answered: it must hold after a power cut.
set -eu

# digest of a file in a sandbox
digest() { sandbox exec "$1" -- sha256sum "$2" | cut -d' ' -f1; }
fill() { sandbox exec "$1" -- sh -c "head -c 300000 /dev/urandom > $2; mkdir -p /root/d; date +%s%N > /root/d/note"; }

case $1 in
  prepare) # N running sandboxes, each with a file and a restore point
    for i in $(seq "$2"); do
      sb=$(sandbox create --name "box$i")
      fill "$sb" /root/before
      snap=$(sandbox snapshot create "$sb" --name "point$i")
      fill "$sb" /root/file
      sandbox exec -d "$sb" -- sleep 100000 > /dev/null
      echo "box$i $(digest "$sb" /root/before) $(digest "$sb" /root/file)"
    done
    ;;
  load)
    n=0
    while :; do
      n=$((n + 1))
      sb=$(sandbox create --name "p$$-$n")
      fill "$sb" /root/file
      sum=$(digest "$sb" /root/file)
      if [ $((n % 2)) = 0 ]; then
        sandbox snapshot create "$sb" --sync --name "s$$-$n" > /dev/null
        echo "snapshot s$$-$n $sum"
      fi
      sandbox stop "$sb" > /dev/null
      echo "stopped $sb $sum"
    done
    ;;
  crashes) # without a process of its own: an emulated one takes too long
    procs=/sys/fs/cgroup/system.slice/sandboxd.service/cgroup.procs
    was= n=0 idle=0
    while [ $n -lt "$2" ]; do
      pid=
      { read -r pid < $procs; } 2> /dev/null || true
      if [ -n "$pid" ] && [ "$pid" != "$was" ]; then
        kill -9 "$pid"
        was=$pid n=$((n + 1)) idle=0
      fi
      idle=$((idle + 1))
      if [ $((idle % 20000)) = 0 ] && systemctl is-failed -q sandboxd; then
        echo "crash $n: the daemon stays down: $(systemctl show -P Result sandboxd)"
        exit 1
      fi
    done
    ;;
esac
