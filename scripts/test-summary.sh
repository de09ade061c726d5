#!/usr/bin/env bash
# test-summary.sh LANE.json...
# Counts the tests in the test2json files of the lanes. The last line reads
# "N passed, N failed, N skipped". A lane without a file, a package that failed
# without a failed test (it did not build, or crashed), and a lane in which
# nothing passed count as failures.
set -euo pipefail

passed=0 failed=0 skipped=0
count() { grep -c "\"Action\":\"$1\".*\"Test\":" "$2" || true; }
# failures names the packages with failed tests (-e), or failed as a whole (-v).
failures() { { grep '"Action":"fail"' "$1" | grep "$2" '"Test":' | grep -o '"Package":"[^"]*"' || true; } | sort -u; }
for file in "$@"; do
  lane=$(basename "$file" .json)
  if [ ! -s "$file" ]; then
    echo "$lane: did not run"
    failed=$((failed + 1))
    continue
  fi
  p=$(count pass "$file") f=$(count fail "$file") s=$(count skip "$file")
  # Packages that failed without a test that did.
  broken=$(comm -23 <(failures "$file" -v) <(failures "$file" -e) | wc -l)
  [ "$p" -gt 0 ] || broken=$((broken + 1))
  echo "$lane: $p passed, $((f + broken)) failed, $s skipped"
  passed=$((passed + p)) failed=$((failed + f + broken)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
