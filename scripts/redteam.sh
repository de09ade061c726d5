#!/usr/bin/env bash
# redteam.sh [MINUTES]
# Attacks the built programs: runs the probes of integration/escape and
# integration/faults at full length, in random order, again and again for
# MINUTES (30). Every round prints its seed; REDTEAM_SEED repeats one round.
# Exits with 1 at the end if any round failed.
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-30}
out=.cache/redteam
mkdir -p "$out"
for package in escape faults; do
  go test -c -tags root -o "$out/$package.test" "./integration/$package"
done
failed=0 rounds=0 end=$((SECONDS + minutes * 60))
while :; do
  seed=${REDTEAM_SEED:-$RANDOM$RANDOM}
  rounds=$((rounds + 1))
  for package in escape faults; do
    echo "== round $rounds, $package, seed $seed"
    (cd "integration/$package" && SANDBOXD_SOAK=1 SANDBOXD_SEED=$seed SANDBOXD_BIN="${SANDBOXD_BIN:-$PWD/../../bin}" \
      ../../scripts/isolate.sh "../../$out/$package.test" -test.shuffle "$seed" -test.timeout 120m -test.run "${RUN:-}") || {
      failed=$((failed + 1))
      echo "FAILED: repeat it with REDTEAM_SEED=$seed make redteam" >&2
    }
  done
  [ -z "${REDTEAM_SEED:-}" ] && [ $SECONDS -lt $end ] || break
done
echo "$rounds rounds, $failed failed"
[ $failed = 0 ]
