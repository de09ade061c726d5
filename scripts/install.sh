#!/usr/bin/env bash
# install.sh: what `make install` runs. Installs below $DESTDIR what make built:
#   $PREFIX/bin                     sandboxd, sandbox, and sbx as its short name
#   $PREFIX/share                   man pages; completions for bash, zsh, fish
#   /usr/lib/systemd/system         the unit   (PREFIX /usr), else /etc/systemd/system
#   /usr/lib/sysusers.d             the group of those who may use the socket
#   /etc/sandboxd/config.yaml       unless there is one
# Without DESTDIR it also makes the group and tells systemd to read its units.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=${PREFIX:-/usr/local} dest=${DESTDIR:-}
units=/etc/systemd/system
[ "$prefix" != /usr ] || units=/usr/lib/systemd/system

install -D -m 755 -t "$dest$prefix/bin" bin/sandboxd bin/sandbox
ln -sf sandbox "$dest$prefix/bin/sbx"

man=$(mktemp -d)
trap 'rm -rf "$man"' EXIT
bin/sandbox man "$man"
bin/sandboxd man "$man"
install -D -m 644 -t "$dest$prefix/share/man/man1" "$man"/*.1
install -D -m 644 -t "$dest$prefix/share/man/man8" "$man"/*.8
for shell in bash zsh fish; do
  case $shell in
    bash) file=bash-completion/completions/sandbox ;;
    zsh) file=zsh/site-functions/_sandbox ;;
    fish) file=fish/vendor_completions.d/sandbox.fish ;;
  esac
  mkdir -p "$(dirname "$dest$prefix/share/$file")"
  bin/sandbox completion $shell > "$dest$prefix/share/$file"
done

mkdir -p "$dest$units"
sed "s|@PREFIX@|$prefix|" packaging/sandboxd.service > "$dest$units/sandboxd.service"
install -D -m 644 packaging/sysusers.conf "$dest/usr/lib/sysusers.d/sandboxd.conf"
[ -e "$dest/etc/sandboxd/config.yaml" ] || install -D -m 644 packaging/config.yaml "$dest/etc/sandboxd/config.yaml"

if [ -z "$dest" ]; then
  getent group sandbox > /dev/null || groupadd --system sandbox
  [ ! -d /run/systemd/system ] || systemctl daemon-reload
  echo "installed; start it with: systemctl enable --now sandboxd"
fi
