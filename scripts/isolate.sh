#!/usr/bin/env bash
# isolate.sh PROGRAM [ARGUMENT...]
# Runs a program in new network and mount namespaces, so that whatever it does
# to links, routes, rules and mounts goes when it ends, however it ends.
set -euo pipefail
exec unshare --net --mount --propagation private -- \
  sh -c 'ip link set lo up && exec "$@"' sh "$@"
