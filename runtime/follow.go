package runtime

import (
	"context"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// reconnect is how long the daemon waits before it asks a PID 1 again
	// that broke the event stream off.
	reconnect = 200 * time.Millisecond
	// followDelay leaves the processors to a new sandbox's first command. PID
	// 1 keeps what happens until then.
	followDelay = 10 * time.Millisecond
	// Events a second taken from one PID 1, and ends of processes written to
	// the log of all. No honest one comes near the first; a burst of short
	// commands may pass the second, and is then told as a number.
	readRate, readBurst     = 2000, 4000
	recordRate, recordBurst = 20, 500
	askRate, askBurst       = 20, 150

	eventProcessExited = "process.exited"
	initSeq            = "init_seq" // key of such an event: PID 1's own number for it
)

// follower reads the process events of one shell for the idle clock, the
// event log and the main process. What it reads is hostile.
type follower struct {
	m         *Manager
	b         *box
	shell     *launch.Shell
	seq       int64             // last event read
	recorded  int64             // last one in the log
	skipped   int               // ends that went into no log since
	ending    sandbox.ProcessID // the main process whose end was seen last
	reading   *bucket
	recording *bucket
	asking    *bucket
}

// run follows until ctx ends. A stream that breaks is opened again where it
// stopped.
func (f *follower) run(ctx context.Context) {
	pause(ctx, followDelay)
	f.m.hurry.letPass(ctx, func() bool { return true })
	for ctx.Err() == nil {
		stream, err := f.b.guest.Events(ctx, f.seq)
		if err == nil {
			err = f.follow(ctx, stream)
		}
		if ctx.Err() != nil {
			return
		}
		f.m.log.DebugContext(ctx, "process events broke off", "sandbox", f.b.id, "err", err)
		pause(ctx, reconnect)
	}
}

// follow reads one event stream to its end.
func (f *follower) follow(ctx context.Context, stream ProcessEvents) error {
	stop := context.AfterFunc(ctx, func() { _ = stream.Close() })
	defer stop()
	defer stream.Close()
	f.b.setBefore(stream.Info().Before) // an earlier daemon may have reset it
	for {
		e, err := stream.Next()
		if err != nil {
			return err
		}
		for !f.reading.take(time.Now()) && ctx.Err() == nil {
			pause(ctx, time.Second/readRate)
		}
		if e.Type == eventsLost {
			if err := f.mainOfLost(ctx); err != nil {
				return err
			}
		}
		f.seq = e.Seq
		f.b.note(func(c *idleClock) { c.live = max(0, e.Live) })
		switch {
		case e.Type == processExited && e.Process.Exit != nil:
			f.exited(ctx, e.Seq, e.Process)
		case e.Type == programAsked && f.asking.take(time.Now()):
			f.m.spawn(func() { f.m.answer(ctx, f.b, e.Ask.ID, e.Ask.Key, e.Ask.Line) })
		}
	}
}

// exited notes the end of a process. PID 1 tells a new daemon all it still
// knows, so an end may be told again: the log has it once.
func (f *follower) exited(ctx context.Context, seq int64, p sandbox.Process) {
	f.m.judge(f.b, p.Exit)
	known := seq <= f.recorded
	switch {
	case known:
	case !f.recording.take(time.Now()):
		f.skipped++
	default:
		d := exitData(p)
		d[initSeq] = strconv.FormatInt(seq, 10)
		if f.skipped > 0 {
			d["skipped"] = strconv.Itoa(f.skipped)
		}
		f.m.recordSoon(ctx, sandbox.Event{Sandbox: f.b.id, Type: eventProcessExited, Actor: "daemon", Data: d})
		f.recorded, f.skipped = seq, 0
	}
	if !known {
		f.m.restorePoint(f.b, p) // of one that nobody was connected to
	}
	f.mainExited(ctx, p)
}

// mainExited ends the sandbox if p was its main process.
func (f *follower) mainExited(ctx context.Context, p sandbox.Process) {
	if p.Main && f.ending != p.ID {
		f.ending = p.ID
		f.m.spawn(func() { f.endWithMain(ctx, p) })
	}
}

// mainOfLost looks whether the end of a main process was among events that PID 1
// has dropped.
func (f *follower) mainOfLost(ctx context.Context) error {
	all, err := f.b.guest.Processes(ctx)
	for _, p := range all {
		if p.Exit != nil {
			f.m.judge(f.b, p.Exit)
			f.mainExited(ctx, p)
		}
	}
	return err
}

func exitData(p sandbox.Process) map[string]string {
	d := map[string]string{"process": clip(string(p.ID), 32), "exit_code": strconv.Itoa(p.Exit.Code)}
	if len(p.Argv) > 0 {
		d["command"] = clip(p.Argv[0], 200)
	}
	if p.Exit.Signal != "" {
		d["signal"] = clip(p.Exit.Signal, 32)
	}
	if p.Exit.OOM {
		d["oom"] = "true"
	}
	if p.Exit.TimedOut {
		d["timed_out"] = "true"
	}
	return d
}

// endWithMain ends the sandbox after its main process, once clients have
// taken what it wrote.
func (f *follower) endWithMain(ctx context.Context, p sandbox.Process) {
	f.b.mu.Lock()
	drained, patience := make(chan struct{}), drainTimeout
	main, back := f.b.mainOf(p.ID), time.Until(f.b.adopted.Add(returnTimeout))
	if main.readers == 0 {
		patience = back
	}
	if main.readers > 0 || back > 0 {
		main.drained = drained
	} else {
		close(drained)
	}
	f.b.mu.Unlock()
	select {
	case <-drained:
	case <-time.After(patience):
	case <-ctx.Done():
		return
	}
	e := mainEnding(*p.Exit)
	e.shell, e.main = f.shell, p.ID
	f.m.endSoon(f.b, e)
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// bucket bounds a rate: burst at once, and then so many a second.
type bucket struct {
	rate, burst, have float64
	at                time.Time
}

func newBucket(rate, burst float64) *bucket { return &bucket{rate: rate, burst: burst, have: burst} }

// take reports whether one more is within the rate at now.
func (b *bucket) take(now time.Time) bool {
	if !b.at.IsZero() {
		b.have = min(b.burst, b.have+now.Sub(b.at).Seconds()*b.rate)
	}
	b.at = now
	if b.have < 1 {
		return false
	}
	b.have--
	return true
}
