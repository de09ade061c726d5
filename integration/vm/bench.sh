#!/usr/bin/env bash
# bench.sh RESULTS [FLAG...]
# Runs bin/bench -vm in the VM, with the flags, and copies what it wrote to the
# directory RESULTS.
#
#   KEEP           if set, use a running VM and leave it running
#   BENCH_TIMEOUT  for the run in the VM; 60m. One that is cut off leaves no results
set -euo pipefail

cd "$(dirname "$0")/../.."
vm=integration/vm/vm.sh
results=$1
shift

leave() { [ -n "${KEEP:-}" ] || "$vm" down; }
trap leave EXIT
if [ -z "${KEEP:-}" ] || ! "$vm" ssh true 2> /dev/null; then
  echo "booting the VM"
  "$vm" up
fi

tree=.cache/vm-bench
rm -rf "$tree"
mkdir -p "$tree"
cp -r bin "$tree/bin"
"$vm" push "$tree"

root=/opt/sandboxd
# A scenario that fails leaves the others their results, which are copied too.
rc=0
"$vm" ssh timeout -k 60 "${BENCH_TIMEOUT:-60m}" \
  $root/bin/bench -vm -bin $root/bin -results $root/results "$@" < /dev/null || rc=$?
mkdir -p "$results"
"$vm" ssh tar -C $root/results -c . | tar -C "$results" --no-same-owner -x || rc=1
exit $rc
