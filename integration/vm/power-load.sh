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
  crashes)
    was=
    for i in $(seq "$2"); do
      pid=$(systemctl show -P MainPID sandboxd)
      [ "$pid" != "$was" ] && [ "$pid" != 0 ] || { echo "crash $i: not started again, $(systemctl is-active sandboxd)"; exit 1; }
      kill -9 "$pid"
      was=$pid
      while now=$(systemctl show -P MainPID sandboxd); [ "$now" = "$pid" ] || [ "$now" = 0 ]; do
        case $(systemctl is-active sandboxd || true) in
          failed | inactive) echo "crash $i: the daemon stays down"; exit 1 ;;
        esac
        sleep 0.1
      done
    done
    ;;
esac
