#!/usr/bin/env bash
# vm.sh up | push DIR | ssh [COMMAND...] | powercut | autopsy | down
#
#   up        boot a fresh VM (see the Vagrantfile)
#   push      copy the tree DIR to /opt/sandboxd in the VM, and sync its disk
#   ssh       run a command in the VM as root, or a shell
#   powercut  kill the VM's QEMU and boot it again from its disk
#   autopsy   of a VM that does not answer: what its kernel printed last, and
#             where its processors are
#   down      remove the VM and everything up made
#
# As root, everything (libvirtd, QEMU, dnsmasq, vagrant, ssh) runs in mount,
# network and process namespaces made for this checkout: the machine's own
# libvirt, interfaces, firewall and sysctls are never touched, checkouts do
# not meet, and when the namespaces' first process dies, however it dies,
# nothing is left. As another user, or with SANDBOXD_BOX set, vagrant runs
# plainly, with whatever provider it has.
set -euo pipefail

self=$(realpath "$0")
checkout=$(realpath "$(dirname "$0")/../..")
name=$(printf %s "$checkout" | sha256sum | cut -c1-8)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd
state=$cache/vm-$name
ssh_config=$state/ssh_config
virsh=(virsh -q -c qemu:///system)
mkdir -p "$cache"
cd "$checkout"

die() { echo "vm.sh: $*" >&2; exit 1; }
isolated() { [ "$(id -u)" = 0 ] && [ -z "${SANDBOXD_BOX:-}" ]; }

# --- the namespaces ---------------------------------------------------------

# alive tells whether the namespaces exist: their first process holds the lock.
alive() { [ -s "$state/pid" ] && ! flock -n "$state/lock" true; }

# start_host makes the namespaces and waits for their libvirtd.
start_host() {
  rm -rf "$state"
  mkdir -p "$state"
  # setsid: ^C in a terminal must reach vagrant and not libvirtd beneath it.
  # Descriptors of the caller's, as those of its locks, are not held along
  # with a VM that stays.
  (
    for fd in /proc/self/fd/*; do
      fd=${fd##*/}
      [ "$fd" -le 2 ] || eval "exec $fd>&-"
    done
    exec setsid unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private \
      "$self" host
  ) > "$state/host.log" 2>&1 < /dev/null &
  for _ in $(seq 300); do
    if [ -e "$state/ready" ]; then
      pgrep -P $! > "$state/pid"
      disown
      return
    fi
    kill -0 $! 2> /dev/null || break
    sleep 0.1
  done
  cat "$state/host.log" >&2
  die "libvirtd did not start"
}

# host is the first process in the namespaces.
host() {
  exec 9> "$state/lock"
  flock 9
  ip link set lo up
  mount -t sysfs sysfs /sys # the old one shows the old network namespace
  for dir in /etc/libvirt /var/lib/libvirt /var/log/libvirt /run/libvirt; do
    mkdir -p "$dir" "$state$dir"
    mount --bind "$state$dir" "$dir"
  done
  cat > /etc/libvirt/qemu.conf << 'CONF'
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
CONF
  printf 'auth_unix_ro = "none"\nauth_unix_rw = "none"\n' > /etc/libvirt/libvirtd.conf
  libvirtd --pid-file /run/libvirt/libvirtd.pid &
  until "${virsh[@]}" version > /dev/null 2>&1; do
    kill -0 $! || exit 1
    sleep 0.1
  done
  touch "$state/ready"
  wait # as process 1, bash reaps what QEMU and libvirtd leave
}

# inside runs this command again in the namespaces.
inside() {
  ! isolated || [ -n "${SANDBOXD_VM_INSIDE:-}" ] && return
  alive || die "the VM is not up: run $0 up"
  export SANDBOXD_VM_INSIDE=1 VAGRANT_DOTFILE_PATH=$state/vagrant SANDBOXD_VM_CONSOLE=$state/console
  exec nsenter --target "$(cat "$state/pid")" --mount --net --pid --wd="$checkout" "$self" "$@"
}

# --- the verbs --------------------------------------------------------------

# box names the local box by its recipe, as the Vagrantfile does.
box=sandboxd-$(sha256sum < integration/vm/build-box.sh | cut -c1-12)
box_dir=${VAGRANT_HOME:-$HOME/.vagrant.d}/boxes/$box

# add_box builds the box unless vagrant has it under the name of its recipe.
add_box() {
  exec 8> "$cache/box.lock"
  flock 8 # two checkouts may want it at once
  if [ ! -d "$box_dir" ]; then
    local tmp
    tmp=$(mktemp -d "$cache/box.XXXXXX")
    trap 'rm -rf "$tmp"' EXIT
    echo "vm.sh: building the box $box (a minute or so, once)"
    quietly unshare --mount --propagation private integration/vm/build-box.sh "$tmp"
    quietly vagrant box add --force --no-tty --name "$box" "$tmp/sandboxd.box"
    rm -rf "$tmp"
    trap - EXIT
  fi
  exec 8>&-
}

# choose_accel boots the box's kernel under KVM, without a disk, until it
# panics: nested, KVM may open and make CPUs on which that kernel then hangs.
choose_accel() {
  [ -z "${SANDBOXD_VM_ACCEL:-}" ] || return 0
  export SANDBOXD_VM_ACCEL=tcg
  [ -w /dev/kvm ] || return 0
  if timeout -k 1 8 qemu-system-x86_64 -accel kvm -cpu host -machine pc -m 256 -nodefaults -display none \
    -no-reboot -kernel "$box_dir"/*/libvirt/vmlinuz -append panic=-1 < /dev/null > /dev/null 2>&1; then
    SANDBOXD_VM_ACCEL=kvm
  fi
}

# quietly runs a command and shows its output only if it fails.
quietly() {
  local log
  log=$(mktemp)
  if ! "$@" > "$log" 2>&1; then
    tr '\r' '\n' < "$log" >&2
    rm "$log"
    die "$* ended with an error"
  fi
  rm "$log"
}

guest() { ssh -F "$ssh_config" vm "$@"; }

# as_root quotes a command for sudo in the guest's shell.
as_root() { guest "sudo -n -- ${*@Q}"; }

wait_ssh() {
  for _ in $(seq 300); do
    if guest true 2> /dev/null; then
      as_root date -s "@$(date +%s)" > /dev/null
      return
    fi
    sleep 0.3
  done
  die "the VM does not answer over ssh"
}

# close_ssh ends the shared connection, which would outlive its other end.
close_ssh() { [ ! -e "$ssh_config" ] || ssh -F "$ssh_config" -O exit vm > /dev/null 2>&1 || true; }

up() {
  quietly vagrant up --no-tty
  mkdir -p "$state"
  {
    vagrant ssh-config --host vm | grep .
    printf '  ControlMaster auto\n  ControlPath %s/ssh\n  ControlPersist 600\n  ConnectTimeout 5\n' "$state"
    # A VM that says nothing for 5 minutes hangs: ssh ends with status 255.
    printf '  ServerAliveInterval 30\n  ServerAliveCountMax 10\n'
  } > "$ssh_config"
  wait_ssh
}

push() {
  as_root mkdir -p /opt/sandboxd
  rsync -a --delete --whole-file --rsync-path="sudo rsync" -e "ssh -F $ssh_config" "$1/" vm:/opt/sandboxd/
  as_root sync # what is not synced is an empty file after a power cut
}

powercut() {
  close_ssh
  if isolated; then
    local domain
    domain=$("${virsh[@]}" list --name | grep .)
    kill -9 "$(cat "/run/libvirt/qemu/$domain.pid")"
    until [ "$("${virsh[@]}" domstate "$domain")" = "shut off" ]; do sleep 0.1; done
    "${virsh[@]}" start "$domain"
  else
    quietly vagrant halt --force
    quietly vagrant up --no-tty --no-provision
  fi
  wait_ssh
}

autopsy() {
  isolated || die "autopsy needs root, and no SANDBOXD_BOX"
  tail -n 40 "$SANDBOXD_VM_CONSOLE"
  "${virsh[@]}" qemu-monitor-command --hmp "$("${virsh[@]}" list --name | grep .)" 'info registers -a' | grep -e CPU -e RIP
}

down() {
  if ! isolated; then
    close_ssh
    vagrant destroy --force
  elif alive; then
    kill -9 "$(cat "$state/pid")" # the namespace's init: everything in it goes too
    flock -w 30 "$state/lock" true || die "processes in the VM's namespaces do not end"
  fi
  rm -rf "$state"
}

verb=${1:-}
case $verb in
  host) host ;;
  up)
    if isolated && [ -z "${SANDBOXD_VM_INSIDE:-}" ]; then
      down
      add_box
      choose_accel
      start_host
      inside up
    fi
    up
    ;;
  push)
    [ -d "${2:-}" ] || die "push needs a directory"
    inside push "$(realpath "$2")"
    push "$2"
    ;;
  ssh)
    inside "$@"
    shift
    if [ $# = 0 ]; then ssh -t -F "$ssh_config" vm sudo -i; else as_root "$@"; fi
    ;;
  powercut)
    inside "$@"
    powercut
    ;;
  autopsy)
    inside "$@"
    autopsy
    ;;
  down) down ;;
  *)
    sed -n '2,11s/^# \{0,1\}//p' "$self"
    exit 2
    ;;
esac
