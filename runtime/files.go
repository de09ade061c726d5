package runtime

import (
	"context"
	"errors"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	eventFilesGone = "sandbox.files_gone"
	eventFilesBack = "sandbox.files_back"
)

// filesOf is the error with code files_gone for a stopped sandbox whose files
// are gone. The row and an event say so too, and that they were put back. The
// caller holds the box.
func (m *Manager) filesOf(ctx context.Context, sb *sandbox.Sandbox) error {
	if sb.Status != sandbox.StatusStopped {
		return nil
	}
	err := m.roots.CheckUpper(sb.ID)
	gone, known := errors.Is(err, sandbox.ErrNotFound), sb.Reason == sandbox.ReasonFilesGone
	if gone == known {
		return err
	}
	ch := unreasoned("daemon")
	ch.EventType = eventFilesBack
	if gone {
		m.log.ErrorContext(ctx, "a stopped sandbox cannot start", "sandbox", sb.ID, "err", err)
		*ch.Reason, *ch.Detail, ch.EventType = sandbox.ReasonFilesGone, explain(err), eventFilesGone
	}
	sb.Reason, sb.Detail = *ch.Reason, *ch.Detail
	if m.open() != nil { // see Quarantined
		return err
	}
	if werr := m.state.Update(ctx, sb.ID, ch); werr != nil {
		m.log.WarnContext(ctx, "write whether the files of a sandbox are there", "sandbox", sb.ID, "err", werr)
	}
	return err
}

// lookForFiles is filesOf for a row as people see it. Where the sandbox is
// being changed its files may be away for a moment.
func (m *Manager) lookForFiles(ctx context.Context, sb *sandbox.Sandbox) {
	if sb.Status != sandbox.StatusStopped || (m.roots.CheckUpper(sb.ID) == nil) == (sb.Reason != sandbox.ReasonFilesGone) {
		return
	}
	b := m.box(sb.ID)
	if b == nil {
		return
	}
	select {
	case b.op <- struct{}{}:
		defer b.unlock()
	default:
		return
	}
	row, err := m.state.Sandbox(ctx, sb.ID)
	if err == nil && m.box(sb.ID) == b {
		_ = m.filesOf(ctx, &row) // it says so
		*sb = row
	}
}
