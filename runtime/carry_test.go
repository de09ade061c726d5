package runtime

import (
	"fmt"
	"slices"
	"strings"
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

// TestCarriedNames: an archive has the names of groups, secrets and volumes as
// their owner says them, and the snapshot keeps those it had.
func TestCarriedNames(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	mark := sandbox.OwnerMark("alice")
	policy := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"example.com:443"}, Group: "crew" + mark, HTTP: &sandbox.HTTPGate{Inject: []sandbox.Credential{{Host: "example.com", Header: "x-key", Secret: "key" + mark}}}}
	snap := sandbox.Snapshot{Owner: "alice", Spec: sandbox.Spec{Network: policy, Volumes: []sandbox.VolumeMount{{Volume: "v" + mark, Path: "/v"}}}}
	var out strings.Builder
	if err := h.exportSnapshot(t.Context(), snap, &out); err != nil {
		t.Fatal(err)
	}
	if got, kept := out.String(), snap.Spec.Volumes[0].Volume+snap.Spec.Network.HTTP.Inject[0].Secret; strings.Contains(got, mark) || !strings.Contains(got, `"group":"crew"`) || !strings.Contains(got, `"secret":"key"`) || !strings.Contains(got, `"volume":"v"`) || strings.Count(kept, mark) != 2 {
		t.Errorf("archive %s, kept %s", got, kept)
	}
}
