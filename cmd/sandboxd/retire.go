package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/sandboxd/sandboxd/sandbox"
)

// retire stops every sandbox where no daemon runs: their files stay, and the
// next daemon can start them. Then the host forgets their network and the
// shells that were kept ready. It is what goes before the removal of the
// package. Repeating it is safe.
func retire(ctx context.Context, c config, log *slog.Logger) (err error) {
	unlock, err := lockAll(c, log)
	if err != nil {
		return err
	}
	defer unlock()
	c.Pool.Size = 0 // none is made, and those that were kept ready go
	var opened closers
	defer func() { err = errors.Join(err, opened.close()) }()
	m, parts, err := assemble(ctx, c, log, &opened)
	if err != nil {
		return err
	}
	both := newWorlds(c, m, parts, log)
	defer func() { err = errors.Join(err, both.close(ctx)) }()
	if err := both.recover(ctx); err != nil {
		return fmt.Errorf("take over what runs: %w", err)
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := both.stopAll(end, sandbox.ReasonNone, ""); err != nil {
		return err
	}
	if err := errors.Join(both.close(end), m.Close(end)); err != nil {
		return err
	}
	if why := m.Quarantined(); why != "" { // what lives without a row needs its network
		log.WarnContext(ctx, "every sandbox that the database knows is stopped; others may go on", "quarantine", why)
		return nil
	}
	log.InfoContext(ctx, "every sandbox is stopped")
	return parts.network.Uninstall()
}
