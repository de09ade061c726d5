package runtime

import (
	"fmt"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLayersOfARecord: a record that names a layer twice, or more than an
// overlay takes, is none; layers of one content under two names count once.
func TestLayersOfARecord(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	c := carried{Layers: map[string]string{}}
	var many []string
	for i := range rootfs.MaxLayers {
		l := fmt.Sprintf("upper:%d", i)
		many, c.Layers[l], h.k.layers["here:"+l] = append(many, l), "here:"+l, true
	}
	c.Layers["upper:same"] = c.Layers["upper:0"]
	for what, tt := range map[string]struct {
		layers, want []string
	}{
		"two":          {[]string{"upper:0", "upper:1"}, []string{"here:upper:0", "here:upper:1"}},
		"most":         {layers: many[1:]},
		"too many":     {layers: many, want: []string{}},
		"one twice":    {layers: []string{"upper:0", "upper:1", "upper:0"}, want: []string{}},
		"same content": {[]string{"upper:0", "upper:1", "upper:same"}, []string{"here:upper:1", "here:upper:0"}},
	} {
		for _, of := range []string{"the snapshot", "its image"} {
			c.Snapshot.Image.Name, c.Snapshot.Layers, c.Snapshot.Image.Layers = "app", tt.layers, []string{"upper:1"}
			if of == "its image" {
				c.Snapshot.Layers, c.Snapshot.Image.Layers = c.Snapshot.Image.Layers, c.Snapshot.Layers
			}
			s, err := h.unpackRecord(c, nil)
			got := s.Layers
			if of == "its image" {
				got = s.Image.Layers
			}
			if bad := tt.want != nil && len(tt.want) == 0; bad != (sandbox.CodeOf(err) == "snapshot_bad_archive") || !bad && err != nil {
				t.Errorf("%s, of %s: %v", what, of, err)
			}
			if len(tt.want) > 0 && !slices.Equal(got, tt.want) {
				t.Errorf("%s, of %s: %v, want %v", what, of, got, tt.want)
			}
		}
	}
}
