// Command probe is what the integration tests run in a sandbox and, as the
// control, outside of one: small, static, and the same in both places.
//
//	probe noop               end at once
//	probe wait               never end
//	probe try DIR PID        try what a sandbox must not do, scratch files in DIR
//	probe status             tell ids, capabilities, no_new_privs and seccomp
//	probe dial NET/ADDR...   connect to each address
//	probe listen NET/ADDR    accept connections until killed
//	probe ask ZONE SECONDS   ask for names below the zone, as fast as it goes
//	probe tree DIR [OP]      change the tree as OP says (JSON); list it
//	probe net FILE           make the network attempts in FILE (JSON); tell what came of each
//	probe flow NET/ADDR TIME send a numbered message each millisecond for so long; tell how many were answered
//	probe echo ADDR          send back what comes by TCP and UDP until killed
//	probe signals ROUNDS [WAY...]  send PID 1's threads every signal in every way; tell the outcomes
//	probe hammer TIME        send them as fast as it goes
//	probe stop-all TIME      stop every process it may, as fast as it goes; go on itself
//	probe signal-control     send some in each way to an ordinary process
//	probe limits             set limits and priorities of PID 1's threads, touch their files
//	probe limits-control     the same on an ordinary process
//	probe entering TIME      stop what is being started, open what it has; tell the outcomes
//	probe entering-control   the same with an ordinary process
//	probe overwrite TIME     write the programs of other processes by way of /proc
//	probe take MOST          take what the host has of some resources, at most so many of each; tell how many it got
//	probe become ID          take a user id, give files to it, in each way
//	probe names SERVER FILE  ask the name server the questions in FILE (JSON); tell what it said
//	probe vmsplice           write to standard output without touching the bytes, until killed
//	probe lease FILE         take a lease on it and keep that
//	probe linger ROUNDS [now] send PID 1's sockets what is slow to close, or is not
//	probe linger-free        tell whether a port and a name that linger sent can be had
//	probe queue-sudo FILE    queue requests to make FILE behind others; let them through when a line comes
//	probe ask-sudo           have PID 1 run true as root
//	probe bad-sudo           send what is no request to PID 1's socket for sudo, until killed
//	probe web FILE           send what FILE says (JSON) to web servers; tell what came back
//
// try, status and dial write a JSON object: name to outcome, "ok" or the error.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("what shall be probed?")
	}
	verb, args := args[0], args[1:]
	switch {
	case verb == "noop":
		return nil
	case verb == "wait":
		for {
			time.Sleep(time.Hour)
		}
	case verb == "try" && len(args) == 2:
		var err error
		if target, err = strconv.Atoi(args[1]); err != nil {
			return err
		}
		return tell(attempts, func(f func(string) error) error { return f(args[0]) })
	case verb == "status":
		return status()
	case verb == "signals" && len(args) > 0:
		rounds, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return signals(1, rounds, args[1:]...)
	case verb == "signal-control":
		return signalControl()
	case (verb == "hammer" || verb == "stop-all" || verb == "entering" || verb == "overwrite") && len(args) == 1:
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		return map[string]func(time.Duration) error{
			"hammer": func(d time.Duration) error { return hammer(1, d) }, "stop-all": stopAll, "entering": entering, "overwrite": overwrite,
		}[verb](d)
	case verb == "entering-control":
		return enteringControl()
	case verb == "take" && len(args) == 1:
		most, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return take(most)
	case verb == "become" && len(args) == 1:
		id, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return become(id)
	case verb == "limits":
		return limits(1)
	case verb == "limits-control":
		return limitsControl()
	case verb == "timer" && len(args) == 1:
		sig, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return ownTimer(sig)
	case verb == "dial":
		targets := map[string]string{}
		for _, a := range args {
			targets[a] = a
		}
		return tell(targets, dial)
	case verb == "listen" && len(args) == 1:
		return listen(args[0])
	case verb == "net" && len(args) == 1:
		return netAttempts(args[0])
	case verb == "echo" && len(args) == 1:
		return echo(args[0])
	case verb == "names" && len(args) == 2:
		return questions(args[0], args[1])
	case verb == "web" && len(args) == 1:
		return webAsks(args[0])
	case verb == "flow" && len(args) == 2:
		return flow(args[0], args[1])
	case verb == "ask" && len(args) == 2:
		return ask(args[0], args[1])
	case verb == "vmsplice":
		return spliceForever()
	case verb == "lease" && len(args) == 1:
		return lease(args[0])
	case verb == "linger" && len(args) > 0:
		rounds, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return linger(rounds, len(args) == 1)
	case verb == "linger-free":
		return lingerFree()
	case verb == "queue-sudo" && len(args) == 1:
		return queueSudo(args[0])
	case verb == "ask-sudo":
		return askSudo()
	case verb == "bad-sudo":
		return badSudo()
	case verb == "tree" && len(args) == 1:
		return tree(args[0], "")
	case verb == "tree" && len(args) == 2:
		return tree(args[0], args[1])
	}
	return fmt.Errorf("unknown: %s %q", verb, args)
}

// tell does each thing and writes the outcomes.
func tell[T any](things map[string]T, do func(T) error) error {
	out := map[string]string{}
	for name, thing := range things {
		out[name] = "ok"
		if err := do(thing); err != nil {
			out[name] = err.Error()
		}
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

func status() error {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	out := map[string]string{"euid": fmt.Sprint(unix.Geteuid()), "egid": fmt.Sprint(unix.Getegid())}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if strings.HasPrefix(name, "Cap") || name == "NoNewPrivs" || name == "Seccomp" {
			out[name] = strings.TrimSpace(value)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

func split(target string) (network, addr string) {
	network, addr, _ = strings.Cut(target, "/")
	return network, addr
}

// dial connects and wants one byte: a connection that something in between
// accepted would give none.
func dial(target string) error {
	network, addr := split(target)
	c, err := net.DialTimeout(network, addr, 2*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	return err
}

func listen(target string) error {
	l, err := net.Listen(split(target))
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		_, _ = c.Write([]byte("x")) // a client that left is no news
		_ = c.Close()
	}
}
