package rootfs

// The user that people and agents work as in a host sandbox.
const hostUserID = 1000

// hostDirs are the directories of the generated layer, parents first.
var hostDirs = []struct {
	name string
	mode int64
	id   int
}{
	{"dev", 0o755, 0},
	{"etc", 0o755, 0},
	{"home", 0o755, 0},
	{"home/user", 0o755, hostUserID},
	{"media", 0o755, 0},
	{"mnt", 0o755, 0},
	{"opt", 0o755, 0},
	{"proc", 0o555, 0},
	{"root", 0o700, 0},
	{"run", 0o755, 0},
	{"run/lock", 0o1777, 0},
	{"srv", 0o755, 0},
	{"sys", 0o555, 0},
	{"tmp", 0o1777, 0},
	{"var", 0o755, 0},
	{"var/cache", 0o755, 0},
	{"var/lib", 0o755, 0},
	{"var/local", 0o755, 0},
	{"var/log", 0o755, 0},
	{"var/opt", 0o755, 0},
	{"var/spool", 0o755, 0},
	{"var/tmp", 0o1777, 0},
	{"etc/opt", 0o755, 0},
	{"etc/profile.d", 0o755, 0},
	{"etc/skel", 0o755, 0},
	{"etc/ssl", 0o755, 0},
	{"etc/ssl/certs", 0o755, 0},
	{"etc/ld.so.conf.d", 0o755, 0},
}

const bashrc = `# ~/.bashrc: read by interactive shells.
case $- in *i*) ;; *) return ;; esac
HISTCONTROL=ignoreboth
shopt -s histappend checkwinsize
PS1='\u@\h:\w\$ '
alias ls='ls --color=auto'
alias ll='ls -l'
`

const profile = `# ~/.profile: read by login shells.
if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi
if [ -d "$HOME/.local/bin" ]; then PATH="$HOME/.local/bin:$PATH"; fi
`

// hostFiles are the files of the generated layer. There are no passwords: '*'
// matches none, and there is no shadow file to read. hostname, hosts and
// resolv.conf are written anew by PID 1 in every sandbox.
var hostFiles = []struct {
	name string
	mode int64
	id   int
	data string
}{
	{"etc/passwd", 0o644, 0, `root:*:0:0:root:/root:/bin/bash
daemon:*:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:*:2:2:bin:/bin:/usr/sbin/nologin
sys:*:3:3:sys:/dev:/usr/sbin/nologin
mail:*:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:*:33:33:www-data:/var/www:/usr/sbin/nologin
user:*:1000:1000:user:/home/user:/bin/bash
nobody:*:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
`},
	{"etc/group", 0o644, 0, `root:*:0:
daemon:*:1:
bin:*:2:
sys:*:3:
adm:*:4:
tty:*:5:
disk:*:6:
mail:*:8:
www-data:*:33:
utmp:*:43:
staff:*:50:
users:*:100:
user:*:1000:
nogroup:*:65534:
`},
	{"etc/nsswitch.conf", 0o644, 0, `passwd:    files
group:     files
shadow:    files
hosts:     files dns
networks:  files
protocols: files
services:  files
ethers:    files
rpc:       files
`},
	{"etc/hosts", 0o644, 0, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
	{"etc/hostname", 0o644, 0, "sandbox\n"},
	{"etc/resolv.conf", 0o644, 0, ""},
	{"etc/machine-id", 0o444, 0, ""}, // empty: programs make do, and none can know the host by it
	{"etc/fstab", 0o644, 0, ""},
	{"etc/shells", 0o644, 0, "/bin/sh\n/bin/bash\n"},
	{"etc/environment", 0o644, 0, ""},
	{"etc/profile", 0o644, 0, `# Read by login shells.
export PATH="${PATH:-` + hostPath + `}"
export LANG="${LANG:-C.UTF-8}"
if [ -n "$BASH_VERSION" ] && [ -n "$PS1" ]; then PS1='\u@\h:\w\$ '; fi
for f in /etc/profile.d/*.sh; do [ -r "$f" ] && . "$f"; done
unset f
`},
	{"etc/bash.bashrc", 0o644, 0, bashrc},
	{"etc/skel/.bashrc", 0o644, 0, bashrc},
	{"etc/skel/.profile", 0o644, 0, profile},
	{"root/.bashrc", 0o644, 0, bashrc},
	{"root/.profile", 0o644, 0, profile},
	{"home/user/.bashrc", 0o644, hostUserID, bashrc},
	{"home/user/.profile", 0o644, hostUserID, profile},
}

// copied names what is taken over from the host's /etc, if the host shows it
// to everybody: the dynamic linker's cache, well-known numbers, the time zone
// and settings that programs of /usr expect.
var copied = []string{
	"etc/ld.so.cache", "etc/ld.so.conf",
	"etc/debian_version", "etc/os-release", "etc/lsb-release",
	"etc/localtime", "etc/timezone", "etc/locale.alias",
	"etc/protocols", "etc/services", "etc/rpc", "etc/ethertypes", "etc/networks",
	"etc/gai.conf", "etc/host.conf", "etc/inputrc", "etc/login.defs",
	"etc/mime.types", "etc/magic", "etc/magic.mime", "etc/mke2fs.conf", "etc/xattr.conf", "etc/netconfig",
	"etc/ca-certificates.conf", "etc/ssl/openssl.cnf",
}

// copiedTrees are patterns of directories taken over by the same rule. They
// are what packages put in /etc because programs in /usr link to it: without
// alternatives there is no editor, without java-*/ no Java.
var copiedTrees = []string{
	"etc/alternatives", "etc/ssl/certs", "etc/ca-certificates", "etc/ld.so.conf.d",
	"etc/terminfo", "etc/fonts", "etc/groff", "etc/perl", "etc/python3*", "etc/java-*-openjdk",
	"etc/vim", "etc/glvnd", "etc/X11/fonts",
}
