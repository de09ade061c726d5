package seccomp

import (
	"fmt"
	"io"
	"os"
	"slices"

	profile "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// withdrawn are calls the default profile allows, some of them depending on
// the kernel, and a workload here does not get.
var withdrawn = []string{
	"ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd",
	"io_uring_setup", "io_uring_enter", "io_uring_register",
	"mount", "umount", "umount2", "pivot_root", "mount_setattr", "move_mount", "open_tree", "open_tree_attr",
	"fsopen", "fsconfig", "fsmount", "fspick", "statmount", "listmount", "chroot", "unshare", "setns",
	"modify_ldt", "name_to_handle_at", "open_by_handle_at", "bpf", "perf_event_open", "userfaultfd",
	"add_key", "request_key", "keyctl", "vhangup",
	// No program asked for these in a look at Python, Node, git, gcc, apt and Java:
	// one tells what the page cache holds of the host's files, one takes memory
	// that cannot be swapped, one frees another's, one is of no use without
	// fanotify_init.
	"cachestat", "memfd_secret", "process_mrelease", "fanotify_mark",
	// The host has 65,536 of these contexts for all (fs.aio-max-nr), and counts
	// them for nobody; databases go on with threads.
	"io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents",
}

// forbidden are answered with EPERM, because programs expect these calls to
// exist and to be refused. All others not allowed answer ENOSYS, as an older
// kernel would, so that programs fall back.
var forbidden = []string{
	"ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns",
	"open_by_handle_at", "bpf", "perf_event_open", "userfaultfd", "add_key", "request_key", "keyctl",
	"reboot", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "swapon", "swapoff",
	"sethostname", "setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "acct", "quotactl",
	"syslog", "iopl", "ioperm", "fanotify_init", "vhangup",
}

// conditional calls are allowed whole here and judged by refusals before.
var conditional = []string{
	"socket", "socketpair", "clone", "clone3", "ioctl", "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open",
	"setuid", "setreuid", "setresuid", "setfsuid", "chown", "lchown", "fchown", "fchownat",
}

// Compile returns the filter as an array of struct sock_filter for
// seccomp(2). It takes some milliseconds and its result fits every sandbox
// of this machine and kernel.
func Compile() ([]byte, error) {
	base, err := profile.GetDefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}})
	if err != nil {
		return nil, fmt.Errorf("reading the default seccomp profile: %w", err)
	}
	filter, err := libseccomp.NewFilter(libseccomp.ActErrno.SetReturnCode(int16(unix.ENOSYS)))
	if err != nil {
		return nil, fmt.Errorf("making a seccomp filter: %w", err)
	}
	defer filter.Release()
	// A search tree by call number: when a filter is installed the kernel tries
	// every call against it, which takes three times as long with a list.
	if err := filter.SetOptimize(2); err != nil {
		return nil, fmt.Errorf("making a seccomp filter a search tree: %w", err)
	}
	// Of i386 and x32 every call answers ENOSYS.
	if err := filter.SetBadArchAction(libseccomp.ActErrno.SetReturnCode(int16(unix.ENOSYS))); err != nil {
		return nil, fmt.Errorf("refusing other architectures: %w", err)
	}
	for _, rule := range base.Syscalls {
		if rule.Action != specs.ActAllow {
			continue
		}
		for _, name := range rule.Names {
			if slices.Contains(withdrawn, name) || slices.Contains(conditional, name) || slices.Contains(forbidden, name) {
				continue
			}
			if err := add(filter, name, libseccomp.ActAllow, rule.Args); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range conditional {
		if err := add(filter, name, libseccomp.ActAllow, nil); err != nil {
			return nil, err
		}
	}
	for _, name := range forbidden {
		if err := add(filter, name, libseccomp.ActErrno.SetReturnCode(int16(unix.EPERM)), nil); err != nil {
			return nil, err
		}
	}
	main, err := export(filter)
	if err != nil {
		return nil, err
	}
	return append(encode(assemble(refusals)), main...), nil
}

// add ignores calls this machine's libseccomp does not know: without a rule
// they answer ENOSYS.
func add(f *libseccomp.ScmpFilter, name string, action libseccomp.ScmpAction, args []specs.LinuxSeccompArg) error {
	call, err := libseccomp.GetSyscallFromName(name)
	if err != nil {
		return nil
	}
	if len(args) == 0 {
		if err := f.AddRule(call, action); err != nil {
			return fmt.Errorf("adding a rule for %s: %w", name, err)
		}
		return nil
	}
	var conds []libseccomp.ScmpCondition
	for _, a := range args {
		op, ok := operators[a.Op]
		if !ok {
			return fmt.Errorf("adding a rule for %s: unknown operator %s", name, a.Op)
		}
		values := []uint64{a.Value}
		if op == libseccomp.CompareMaskedEqual {
			values = []uint64{a.Value, a.ValueTwo}
		}
		c, err := libseccomp.MakeCondition(a.Index, op, values...)
		if err != nil {
			return fmt.Errorf("adding a rule for %s: %w", name, err)
		}
		conds = append(conds, c)
	}
	if err := f.AddRuleConditional(call, action, conds); err != nil {
		return fmt.Errorf("adding a rule for %s: %w", name, err)
	}
	return nil
}

var operators = map[specs.LinuxSeccompOperator]libseccomp.ScmpCompareOp{
	specs.OpNotEqual: libseccomp.CompareNotEqual, specs.OpLessThan: libseccomp.CompareLess, specs.OpLessEqual: libseccomp.CompareLessOrEqual,
	specs.OpEqualTo: libseccomp.CompareEqual, specs.OpGreaterEqual: libseccomp.CompareGreaterEqual,
	specs.OpGreaterThan: libseccomp.CompareGreater, specs.OpMaskedEqual: libseccomp.CompareMaskedEqual,
}

// export goes through a memory file: exporting to memory needs a libseccomp
// newer than 2.5, which Debian 12 has.
func export(f *libseccomp.ScmpFilter) ([]byte, error) {
	fd, err := unix.MemfdCreate("seccomp", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a memory file for the seccomp program: %w", err)
	}
	file := os.NewFile(uintptr(fd), "seccomp")
	defer file.Close()
	if err := f.ExportBPF(file); err != nil {
		return nil, fmt.Errorf("compiling the seccomp filter: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("reading the seccomp program: %w", err)
	}
	b, err := io.ReadAll(file)
	if err != nil {
		return nil, fmt.Errorf("reading the seccomp program: %w", err)
	}
	return b, nil
}
