#!/usr/bin/env bash
# test-summary.sh LANE.json...
# Counts the tests in the test2json files of the lanes. The last line reads
# "N passed, N failed, N skipped". A lane without a file, a package that failed
# without a failed test (it did not build, or crashed), and a lane in which
# nothing passed count as failures.
set -euo pipefail

passed=0 failed=0 skipped=0
count() { grep -c "\"Action\":\"$1\".*\"Test\":" "$2" || true; }
for file in "$@"; do
  lane=$(basename "$file" .json)
  if [ ! -s "$file" ]; then
    echo "$lane: did not run"
    failed=$((failed + 1))
    continue
  fi
  p=$(count pass "$file") f=$(count fail "$file") s=$(count skip "$file")
  broken=$(grep '"Action":"fail"' "$file" | grep -v '"Test":' | grep -o '"Package":"[^"]*"' | sort -u | while read -r package; do
    grep -F "$package" "$file" | grep -q '"Action":"fail".*"Test":' || echo "$package"
  done | wc -l)
  [ "$p" -gt 0 ] || broken=$((broken + 1))
  echo "$lane: $p passed, $((f + broken)) failed, $s skipped"
  passed=$((passed + p)) failed=$((failed + f + broken)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
