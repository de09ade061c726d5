#!/usr/bin/env bash
# build-box.sh OUTDIR
#
# Builds OUTDIR/sandboxd.box, a vagrant-libvirt box with Debian 12, from
# Debian packages alone: no image is downloaded. Needs root, and mmdebstrap,
# e2fsprogs, qemu-utils. Takes under a minute.
#
# The disk is one bare ext4 file system without a boot loader: QEMU starts the
# kernel that lies beside it in the box (see the Vagrantfile written below).
#
# vm.sh names the box after this file's hash, so every edit makes a new box.
# MIRROR names another package mirror than mmdebstrap's own choice.
set -euo pipefail

out=$(mkdir -p "$1" && cd "$1" && pwd)
size_gb=10
packages=(
  # the system
  systemd-sysv udev dbus libpam-systemd linux-image-cloud-amd64 initramfs-tools zstd
  openssh-server sudo rsync kmod procps less ca-certificates
  # what sandboxd itself needs
  iproute2 nftables e2fsprogs xfsprogs libseccomp2
  # what its tests use
  curl git iperf3 iptables iputils-ping netcat-openbsd python3-minimal quota strace stress-ng umoci docker-registry skopeo
  # what the benchmark measures it beside
  runc crun bubblewrap busybox-static
)

tmp=$(mktemp -d "${TMPDIR:-/tmp}/sandboxd-box.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
root=$tmp/root

# The initramfs holds only what reaches the root disk.
cat > "$tmp/initramfs" <<'HOOK'
mkdir -p "$1/etc/initramfs-tools/conf.d"
echo MODULES=list > "$1/etc/initramfs-tools/conf.d/modules"
printf '%s\n' virtio_pci virtio_blk virtio_net ext4 > "$1/etc/initramfs-tools/modules"
HOOK
chmod +x "$tmp/initramfs"

mmdebstrap --quiet --mode=root --variant=minbase --include="${packages[*]}" \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --essential-hook="$tmp/initramfs" \
  bookworm "$root" ${MIRROR:+"$MIRROR"}

echo '/dev/vda / ext4 defaults,noatime 0 1' > "$root/etc/fstab"
echo sandboxd-vm > "$root/etc/hostname"
echo '127.0.0.1 localhost sandboxd-vm' > "$root/etc/hosts"
cat > "$root/etc/systemd/network/10-dhcp.network" <<'NET'
[Match]
Name=en* eth0
[Network]
DHCP=ipv4
[DHCPv4]
ClientIdentifier=mac
NET
echo 'nameserver 192.168.121.1' > "$root/etc/resolv.conf" # of vagrant-libvirt's network
chroot "$root" systemctl -q enable systemd-networkd ssh
chroot "$root" systemctl -q disable docker-registry # tests start their own
chroot "$root" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer \
  e2scrub_all.timer e2scrub_reap.service dpkg-db-backup.timer fstrim.timer \
  systemd-networkd-wait-online.service

# Vagrant's user: its public well-known key, sudo without a password. The VM's
# network does not leave this machine.
chroot "$root" useradd -m -s /bin/bash vagrant
echo 'vagrant ALL=(ALL) NOPASSWD:ALL' > "$root/etc/sudoers.d/vagrant"
chmod 440 "$root/etc/sudoers.d/vagrant"
key=$(printf '%s\n' /usr/share/rubygems-integration/all/gems/vagrant-[0-9]*/keys/vagrant.pub | tail -n 1)
install -d -m 700 "$root/home/vagrant/.ssh"
install -m 600 "$key" "$root/home/vagrant/.ssh/authorized_keys"
chroot "$root" chown -R vagrant:vagrant /home/vagrant
# Without sntrup761, which takes seconds on an emulated CPU.
cat > "$root/etc/ssh/sshd_config.d/vagrant.conf" <<'SSHD'
UseDNS no
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256
SSHD

rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*
rm -f "$root/etc/machine-id"
chroot "$root" systemd-machine-id-setup 2>/dev/null # with an id, systemd skips its first-boot presets

cp "$root"/boot/vmlinuz-* "$tmp/vmlinuz"
cp "$root"/boot/initrd.img-* "$tmp/initrd"
truncate -s ${size_gb}G "$tmp/raw"
mke2fs -q -t ext4 -E lazy_itable_init=1,nodiscard -d "$root" "$tmp/raw"
rm -rf "$root"
qemu-img convert -O qcow2 "$tmp/raw" "$tmp/box.img"
rm "$tmp/raw"
echo "{\"provider\":\"libvirt\",\"format\":\"qcow2\",\"virtual_size\":$size_gb}" > "$tmp/metadata.json"
cat > "$tmp/Vagrantfile" <<'RUBY'
Vagrant.configure("2") do |config|
  config.vm.guest = :debian
  config.ssh.insert_key = false
  config.vm.provider :libvirt do |lv|
    lv.disk_bus = "virtio"
    lv.kernel   = File.join(__dir__, "vmlinuz")
    lv.initrd   = File.join(__dir__, "initrd")
    lv.cmd_line = "root=/dev/vda rw console=ttyS0 mitigations=off nowatchdog tsc=reliable quiet"
  end
end
RUBY
tar -C "$tmp" -cf "$out/sandboxd.box" metadata.json Vagrantfile box.img vmlinuz initrd
