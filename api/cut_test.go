package api

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestCutAndEnd: a connection is closed after its request was cut, and never
// once that request has ended. The control is the one that goes on.
func TestCutAndEnd(t *testing.T) {
	why := errors.New("the key was revoked")
	for name, c := range map[string]struct {
		do    func(cut func(error), end func())
		hangs int
	}{
		"goes on":             {func(cut func(error), _ func()) { cut(why) }, 1},
		"cut twice":           {func(cut func(error), _ func()) { cut(why); cut(why) }, 1},
		"ended soon after":    {func(cut func(error), end func()) { cut(why); end() }, 0},
		"ended before":        {func(cut func(error), end func()) { end(); cut(why) }, 0},
		"ended in the midst":  {func(cut func(error), end func()) { go cut(why); end() }, 0},
		"ended and never cut": {func(_ func(error), end func()) { end(); end() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hangs := 0
				held, cut, end := WithCut(t.Context(), func() { hangs++ })
				c.do(cut, end)
				synctest.Wait()
				if cause := context.Cause(held); c.hangs > 0 && !errors.Is(cause, why) || cause == nil {
					t.Errorf("cause: %v", cause)
				}
				<-time.After(2 * lastWord)
				synctest.Wait()
				if hangs != c.hangs {
					t.Errorf("hung up %d times, want %d", hangs, c.hangs)
				}
				end()
			})
		})
	}
}
