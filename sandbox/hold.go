package sandbox

import "context"

type holdKey struct{}

// WithHold returns a context for one operation that brings layers in or builds
// on them. HoldLayers and HoldAll call hold, the latter with none.
func WithHold(ctx context.Context, hold func(layers []string)) context.Context {
	return context.WithValue(ctx, holdKey{}, hold)
}

// HoldLayers keeps layers, there already or not, from being collected until the
// operation a context belongs to ends. It comes before a layer is made or
// looked for. A context without an operation holds nothing.
func HoldLayers(ctx context.Context, layers ...string) {
	if hold, ok := ctx.Value(holdKey{}).(func([]string)); ok && len(layers) > 0 {
		hold(layers)
	}
}

// HoldAll stops all collecting until the operation ends, which must be soon.
func HoldAll(ctx context.Context) {
	if hold, ok := ctx.Value(holdKey{}).(func([]string)); ok {
		hold(nil)
	}
}
