#!/usr/bin/env bash
# deps.sh PACKAGE...
# Installs the Debian packages that are missing, or says how to when not root.
set -euo pipefail

# One at a time: a second call finds what the first has installed.
{ exec 9> /var/tmp/sandboxd-deps.lock; } 2> /dev/null && flock 9

missing=()
for package in "$@"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit 0

if [ "$(id -u)" != 0 ]; then
  echo "missing packages; run: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Daemons that come with the packages must not start: the lanes start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod +x $policy
  trap 'rm -f "$log" $policy' EXIT
fi
if ! { apt-get update -qq && apt-get install -qqy -o DPkg::Lock::Timeout=600 --no-install-recommends "${missing[@]}"; } > "$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
