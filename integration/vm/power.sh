#!/usr/bin/env bash
# power.sh [reboot | crashes | cuts | all]
# Installs the unit in the VM and takes the machine away under it:
#
#   reboot   20 running sandboxes over `systemctl reboot`: none loses a file or
#            a restore point, each starts at the first try
#   crashes  20 times kill -9 of the daemon in a row: back each time
#   cuts     CUTS (20) times the power is cut under load: every stop that was
#            answered starts at the first try with its files whole, every
#            snapshot that was answered is there, and what ran is kept
#
#   BIN, UNIT  other programs and another unit, to see this fail
set -euo pipefail
cd "$(dirname "$0")/../.."
vm=integration/vm/vm.sh
bin=${BIN:-bin} unit=${UNIT:-packaging/sandboxd.service} what=${1:-all} cuts=${CUTS:-20} boxes=${BOXES:-20}
work=.cache/power
failures=0
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
bad() { say "FAIL: $*"; failures=$((failures + 1)); }
sh_in() { "$vm" ssh sh -c "$1" < /dev/null; }
guest() { "$vm" ssh "$@" < /dev/null; }
load=/opt/sandboxd/power-load.sh

ready() { # waits for the daemon after a boot
  for _ in $(seq 300); do
    timeout 30 "$vm" ssh sandbox version < /dev/null > /dev/null 2>&1 && return # an emulated machine may hang
    sleep 1
  done
  guest journalctl -u sandboxd -n 30 --no-pager || true
  say "the daemon does not answer"; exit 1
}

setup() {
  rm -rf "$work"; mkdir -p "$work"
  cp "$bin"/sandboxd "$bin"/sandbox integration/vm/power-load.sh "$work"
  sed 's|@PREFIX@|/usr/local|' "$unit" > "$work/sandboxd.service"
  guest true 2> /dev/null || "$vm" up
  "$vm" push "$work"
  sh_in 'systemctl stop sandboxd 2>/dev/null; cd /opt/sandboxd; install -m 755 sandboxd sandbox /usr/local/bin/
    install -D -m 644 sandboxd.service /etc/systemd/system/sandboxd.service
    mkdir -p /etc/sandboxd /var/log/journal; printf "volume: {size: 2g}\npool: {size: 1}\n" > /etc/sandboxd/config.yaml
    for f in / /usr/local/bin; do sync -f $f; done
    systemctl daemon-reload; systemctl enable -q sandboxd; systemctl start sandboxd; sync'
  ready
}

clean() { sh_in 'sandbox ls -q | xargs -r sandbox rm > /dev/null; sandbox snapshot ls -o json | grep -o "\"id\": *\"sn[a-z0-9]*" | grep -o "sn[a-z0-9]*$" | sort -u | xargs -r sandbox snapshot rm > /dev/null' || true; }

status() { guest sandbox inspect "$1" -o json | tr -d ' \n' | grep -o '"status":"[a-z]*"' | head -1 | cut -d'"' -f4; }

reboot() {
  say "reboot: $boxes running sandboxes"
  clean
  guest sh $load prepare "$boxes" > "$work/boxes"
  local boot; boot=$(guest cat /proc/sys/kernel/random/boot_id)
  guest systemctl reboot || true
  until now=$(timeout 20 "$vm" ssh cat /proc/sys/kernel/random/boot_id < /dev/null 2> /dev/null) && [ "$now" != "$boot" ]; do sleep 1; done
  ready
  while read -r name before file; do
    [ "$(status "$name")" = stopped ] || bad "$name is $(status "$name"), want stopped"
    guest sandbox start "$name" > /dev/null || { bad "$name does not start"; continue; }
    [ "$(sh_in "sandbox exec $name -- sha256sum /root/file" | cut -d' ' -f1)" = "$file" ] || bad "$name lost its file"
    guest sandbox rollback "$name" "point${name#box}" > /dev/null || bad "$name lost its restore point"
    [ "$(sh_in "sandbox exec $name -- sha256sum /root/before" | cut -d' ' -f1)" = "$before" ] || bad "the restore point of $name lost its file"
  done < "$work/boxes"
  say "reboot: $(wc -l < "$work/boxes") sandboxes looked at"
  clean
}

crashes() {
  say "crashes: 20 in a row"
  if guest sh $load crashes 20; then ready; else bad "crashes"; fi
}

powercut() {
  : > "$work/load"
  ("$vm" ssh sh $load load >> "$work/load" 2> /dev/null < /dev/null || true) &
  local loader=$!
  sleep $((10 + RANDOM % 15)).$((RANDOM % 10))
  "$vm" powercut
  wait $loader || true
  ready
  # Whole lines alone were answered.
  while read -r kind name sum; do
    if [ "$kind" = stopped ]; then
      guest sandbox start "$name" > /dev/null || { bad "stopped sandbox $name does not start at the first try"; continue; }
    else
      guest sandbox fork "$name" --name "f-$name" > /dev/null || { bad "snapshot $name is gone"; continue; }
      name=f-$name
    fi
    [ "$(sh_in "sandbox exec $name -- sha256sum /root/file" | cut -d' ' -f1)" = "$sum" ] || bad "$kind $name lost its file"
  done < <(awk 'NF == 3 && length($3) == 64' "$work/load")
  kept=$(sh_in "sandbox ls --status stopped -o json" | grep -c host_restart || true)
  say "cut $1: $(grep -c ^stopped "$work/load") stops, $(grep -c ^snapshot "$work/load" || true) snapshots, $kept kept unclean"
  clean
}

setup
case $what in reboot | all) reboot ;; esac
case $what in crashes | all) crashes ;; esac
case $what in cuts | all) clean; for i in $(seq "$cuts"); do powercut "$i"; done ;; esac
say "$failures failures"
[ $failures = 0 ]
