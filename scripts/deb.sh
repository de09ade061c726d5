#!/usr/bin/env bash
# deb.sh NFPM VERSION OUTDIR
# What `make deb` runs: packs what make built as OUTDIR/sandboxd_VERSION_ARCH.deb
# and prints its path. VERSION is git's; one that is not a number, as of a
# checkout without tags, goes after 0.0.0~git and the number of commits.
set -euo pipefail
cd "$(dirname "$0")/.."

nfpm=$1 version=${2#v} out=$3
case $version in
  [0-9]*.[0-9]*) ;;
  *) version=0.0.0~git$(git rev-list --count HEAD 2> /dev/null || echo 0).$version ;;
esac
version=${version//-/+} # a hyphen begins Debian's own revision
ARCH=$(go env GOARCH)
STAGE=$(mktemp -d)
trap 'rm -rf "$STAGE"' EXIT
export ARCH STAGE VERSION=$version

DESTDIR=$STAGE PREFIX=/usr scripts/install.sh
rm -r "$STAGE/etc" "$STAGE/usr/bin/sbx" # a conffile and a link, which nfpm.yaml names itself
chmod 755 "$STAGE"
find "$STAGE/usr/share/man" -type f -exec gzip -9n {} +
# Debian's own zsh looks here.
mkdir -p "$STAGE/usr/share/zsh/vendor-completions"
mv "$STAGE/usr/share/zsh/site-functions/_sandbox" "$STAGE/usr/share/zsh/vendor-completions/"
rmdir "$STAGE/usr/share/zsh/site-functions"
doc=$STAGE/usr/share/doc/sandboxd
install -D -m 644 packaging/deb/copyright "$doc/copyright"
gzip -9nc CHANGELOG.md > "$doc/changelog.gz"
printf 'sandboxd (%s) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- sandboxd maintainers <maintainers@sandboxd.example>  %s\n' \
  "$version" "$(git log -1 --format=%cD 2> /dev/null || date -R)" | gzip -9n > "$doc/changelog.Debian.gz"
install -D -m 644 -t "$doc" README.md docs/OPERATIONS.md docs/SECURITY.md docs/API.md
[ ! -d packaging/grafana ] || install -D -m 644 -t "$STAGE/usr/share/sandboxd/grafana" packaging/grafana/*.json

mkdir -p "$out"
deb=$out/sandboxd_${version}_$ARCH.deb
"$nfpm" package --config packaging/deb/nfpm.yaml --packager deb --target "$deb" >&2
echo "$deb"
