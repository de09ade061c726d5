package sbx

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const help = `Usage: sbx cost add --meter METER --qty NUMBER [--key KEY] [--note TEXT]
       sbx cost add --amount AMOUNT [--key KEY] [--note TEXT]
       sbx revenue add --amount AMOUNT [--key KEY] [--note TEXT]

Enters what this sandbox costs or earns, and prints what that comes to. With
--key the same entry is taken once, however often it is sent.

  --meter METER    a meter of the price book in force, as tokens
  --qty NUMBER     how much of it
  --amount AMOUNT  in the currency of the price books, as 12.5
  --key KEY        idempotency key
  --note TEXT      a word on what it is
  --wait SECONDS   how long to try again while nobody answers (60)
`

// Exit codes.
const (
	exitRefused = 1
	exitUsage   = 2
	exitNobody  = 3 // tried until the end, and not known whether it was taken
)

// address is PID 1's socket, an abstract one.
const address = "sandbox"

// entry is the line that is sent.
type entry struct {
	Op       string `json:"op"`
	Amount   string `json:"amount,omitempty"`
	Meter    string `json:"meter,omitempty"`
	Quantity string `json:"quantity,omitempty"`
	Key      string `json:"key"`
	Note     string `json:"note,omitempty"`
}

// answer is the line that comes back.
type answer struct {
	Charged *string `json:"charged"`
	Error   *struct {
		Class  string `json:"class"`
		Code   string `json:"code"`
		Detail string `json:"detail"`
	} `json:"error"`
}

// errUsage is a mistake in the arguments.
var errUsage = errors.New("wrong arguments")

// Main runs the program and returns its exit code.
func Main(args []string) int { return run(args, os.Stdout, os.Stderr, address) }

func run(args []string, out, errs io.Writer, address string) int {
	if len(args) > 0 && (args[0] == "--help" || args[0] == "-h" || args[0] == "help") {
		_, _ = io.WriteString(out, help)
		return 0
	}
	e, wait, err := parse(args)
	if err != nil {
		fmt.Fprintf(errs, "sbx: %v\n%s", err, help)
		return exitUsage
	}
	a, err := send(e, address, time.Now().Add(wait))
	switch {
	case err != nil:
		fmt.Fprintf(errs, "sbx: %v: send the same again, with --key %s\n", err, e.Key)
		return exitNobody
	case a.Error != nil:
		fmt.Fprintf(errs, "sbx: %s (%s)\n", a.Error.Detail, a.Error.Code)
		return exitRefused
	}
	fmt.Fprintln(out, *a.Charged)
	return 0
}

// parse reads the arguments. An entry without a key gets one, for a second try
// here.
func parse(args []string) (e entry, wait time.Duration, err error) {
	wait = time.Minute
	if len(args) < 2 || args[0] != "cost" && args[0] != "revenue" || args[1] != "add" {
		return e, 0, fmt.Errorf("%w: begin with cost add or revenue add", errUsage)
	}
	e.Op = args[0]
	seconds := ""
	flags := map[string]*string{
		"amount": &e.Amount, "meter": &e.Meter, "qty": &e.Quantity, "key": &e.Key, "note": &e.Note, "wait": &seconds,
	}
	for rest := args[2:]; len(rest) > 0; {
		name, value, whole := strings.Cut(strings.TrimLeft(rest[0], "-"), "=")
		to := flags[name]
		if !strings.HasPrefix(rest[0], "-") || to == nil {
			return e, 0, fmt.Errorf("%w: %q", errUsage, rest[0])
		}
		if rest = rest[1:]; !whole {
			if len(rest) == 0 {
				return e, 0, fmt.Errorf("%w: --%s needs a value", errUsage, name)
			}
			value, rest = rest[0], rest[1:]
		}
		*to = value
	}
	switch {
	case (e.Amount == "") == (e.Meter == ""):
		return e, 0, fmt.Errorf("%w: give --amount, or --meter and --qty", errUsage)
	case (e.Meter == "") != (e.Quantity == ""):
		return e, 0, fmt.Errorf("%w: --meter and --qty go together", errUsage)
	}
	if seconds != "" {
		if wait, err = time.ParseDuration(seconds + "s"); err != nil || wait < 0 {
			return e, 0, fmt.Errorf("%w: --wait %q: use a number of seconds", errUsage, seconds)
		}
	}
	if e.Key == "" {
		e.Key = "sbx-" + rand.Text()
	}
	return e, wait, nil
}

// retryAfter is the wait before another try.
const retryAfter = 500 * time.Millisecond

// send sends an entry until it is answered with more than that nobody is there.
func send(e entry, address string, until time.Time) (answer, error) {
	line, err := json.Marshal(e)
	if err != nil {
		return answer{}, err
	}
	for {
		a, err := ask(line, address)
		again := err != nil || a.Error != nil && (a.Error.Class == "unavailable" || a.Error.Code == "too_many_requests")
		if !again {
			return a, nil
		}
		if time.Now().Add(retryAfter).After(until) {
			if err == nil {
				err = errors.New(a.Error.Detail)
			}
			return a, err
		}
		<-time.After(retryAfter)
	}
}

// ask sends one line and reads one.
func ask(line []byte, address string) (a answer, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return a, fmt.Errorf("open a socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), address)
	defer f.Close()
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: "@" + address}); err != nil {
		return a, fmt.Errorf("reach PID 1: %w", err)
	}
	// PID 1 itself gives up on the daemon before this.
	patience := unix.Timeval{Sec: 45}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		return a, fmt.Errorf("open a socket: %w", err)
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		return a, fmt.Errorf("ask PID 1: %w", err)
	}
	back, err := bufio.NewReader(f).ReadSlice('\n')
	if err == nil {
		err = json.Unmarshal(back, &a)
	}
	if err == nil && a.Error == nil && a.Charged == nil {
		err = errors.New("neither an amount nor an error")
	}
	if err != nil {
		return a, fmt.Errorf("read PID 1's answer: %w", err)
	}
	return a, nil
}
