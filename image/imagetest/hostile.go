package imagetest

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// Hostile is one way in which a registry can lie, break or dawdle.
type Hostile struct {
	Name string
	// Set prepares the registry and returns what to pull, below the host.
	Set  func(g *Registry) string
	Code string // of the error; empty: the pull succeeds all the same
	Slow bool   // takes as long as it takes to see that nothing comes
}

// path is the repository of every hostile image.
const path = "hostile/app"

// image puts an image of two layers and returns its name.
func image(g *Registry, seed int, change func(cfg, manifest map[string]any)) (*Image, string) {
	m := New(seed, 2, 200_000).Seal(change)
	g.Put(path, "1", m)
	return m, path + ":1"
}

// blobs lets f answer requests for blobs of one layer.
func blobs(g *Registry, digest string, f func(w http.ResponseWriter, r *http.Request) bool) {
	g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		return r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/blobs/"+digest) && f(w, r)
	})
}

// layer makes a hostile registry of one that answers for its first layer
// with f.
func layer(seed int, f func(m *Image, blob []byte, w http.ResponseWriter, r *http.Request) bool) func(*Registry) string {
	return func(g *Registry) string {
		m, name := image(g, seed, nil)
		d := m.Layers[0].Digest
		blobs(g, d, func(w http.ResponseWriter, r *http.Request) bool { return f(m, m.Blobs[d], w, r) })
		return name
	}
}

// manifests lets f answer requests for manifests.
func manifests(f func(w http.ResponseWriter, r *http.Request)) func(*Registry) string {
	return func(g *Registry) string {
		g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				f(w, r)
				return true
			}
			return false
		})
		return path + ":1"
	}
}

// sealed makes a registry with an image whose documents were changed.
func sealed(seed int, change func(cfg, manifest map[string]any)) func(*Registry) string {
	return func(g *Registry) string {
		_, name := image(g, seed, change)
		return name
	}
}

// pour writes until the reader has gone.
func pour(w http.ResponseWriter, r *http.Request) {
	chunk := Noise(7, 64<<10)
	for r.Context().Err() == nil {
		if _, err := w.Write(chunk); err != nil {
			return
		}
	}
}

// cut breaks the connection off.
func cut() { panic(http.ErrAbortHandler) }

// flush sends what was written.
func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// Hostiles is the table.
func Hostiles() []Hostile {
	return append(append(hostileBlobs(), hostileDocuments()...), hostileAnswers()...)
}

// hostileBlobs lie about the content of layers.
func hostileBlobs() []Hostile {
	return []Hostile{
		{Name: "honest", Set: sealed(1, nil)},
		{Name: "truncated blobs, always", Code: "registry_unreachable", Set: layer(2, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:1000])
			cut()
			return true
		})},
		{Name: "a blob that is shorter than it should be", Code: "registry_unreachable", Set: layer(3, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
			_, _ = w.Write(b[:len(b)/2])
			return true
		})},
		{Name: "other bytes of the same size", Code: "image_digest_mismatch", Set: layer(4, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
			_, _ = w.Write(Noise(99, len(b)))
			return true
		})},
		{Name: "one bit is wrong at the end", Code: "image_digest_mismatch", Set: layer(5, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
			wrong := append([]byte(nil), b...)
			wrong[len(wrong)-1] ^= 1
			_, _ = w.Write(wrong)
			return true
		})},
		{Name: "more bytes, and it says so", Code: "image_digest_mismatch", Set: layer(6, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)+1))
			_, _ = w.Write(append(append([]byte(nil), b...), 0))
			return true
		})},
		{Name: "an endless blob", Code: "image_digest_mismatch", Set: layer(7, func(_ *Image, _ []byte, w http.ResponseWriter, r *http.Request) bool {
			pour(w, r)
			return true
		})},
		{Name: "an endless blob that begins right", Code: "image_digest_mismatch", Set: layer(8, func(_ *Image, b []byte, w http.ResponseWriter, r *http.Request) bool {
			_, _ = w.Write(b)
			pour(w, r)
			return true
		})},
		{Name: "a blob that is not there", Code: "image_not_found", Set: func(g *Registry) string {
			m, name := image(g, 9, nil)
			g.Forget(path, m.Layers[1].Digest)
			return name
		}},
		{Name: "an empty blob", Code: "registry_unreachable", Set: layer(10, func(_ *Image, _ []byte, _ http.ResponseWriter, _ *http.Request) bool { return true })},
		{Name: "breaks off twice, then goes on by Range", Set: func(g *Registry) string {
			var n atomic.Int32
			return layer(11, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1) > 2 {
					return false
				}
				w.Header().Set("Content-Length", fmt.Sprint(len(b)))
				_, _ = w.Write(b[:len(b)/2])
				flush(w)
				cut()
				return true
			})(g)
		}},
		{Name: "knows no ranges", Set: func(g *Registry) string {
			var n atomic.Int32
			return layer(12, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
				w.Header().Set("Content-Length", fmt.Sprint(len(b)))
				if n.Add(1) == 1 {
					_, _ = w.Write(b[:len(b)/2])
					flush(w)
					cut()
				}
				_, _ = w.Write(b)
				return true
			})(g)
		}},
		{Name: "another range than asked for", Code: "registry_unreachable", Set: func(g *Registry) string {
			var n atomic.Int32
			return layer(13, func(_ *Image, b []byte, w http.ResponseWriter, r *http.Request) bool {
				if n.Add(1)%2 == 1 {
					w.Header().Set("Content-Length", fmt.Sprint(len(b)))
					_, _ = w.Write(b[:1000])
					flush(w)
					cut()
				}
				w.Header().Set("Content-Range", fmt.Sprintf("bytes 5-%d/%d", len(b)-1, len(b)))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(b[5:])
				return true
			})(g)
		}},
		{Name: "416 for everything", Code: "registry_refused", Set: layer(14, func(_ *Image, _ []byte, w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return true
		})},
		{Name: "the second half is another's", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			var n atomic.Int32
			return layer(15, func(_ *Image, b []byte, w http.ResponseWriter, _ *http.Request) bool {
				half := len(b) / 2
				if n.Add(1) == 1 {
					w.Header().Set("Content-Length", fmt.Sprint(len(b)))
					_, _ = w.Write(b[:half])
					flush(w)
					cut()
				}
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", half, len(b)-1, len(b)))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(Noise(98, len(b)-half))
				return true
			})(g)
		}},
		{Name: "stops sending", Code: "registry_unreachable", Slow: true, Set: layer(16, func(_ *Image, b []byte, w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:10])
			flush(w)
			<-r.Context().Done()
			return true
		})},
		{Name: "a byte at a time", Code: "registry_unreachable", Slow: true, Set: layer(17, func(_ *Image, b []byte, w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for i := 0; r.Context().Err() == nil && i < len(b); i++ {
				_, _ = w.Write(b[i : i+1])
				flush(w)
				<-tick.C
			}
			return true
		})},
	}
}

// hostileDocuments lie in manifests and configurations.
func hostileDocuments() []Hostile {
	descriptors := func(n int) []Descriptor {
		out := make([]Descriptor, n)
		for i := range out {
			out[i] = Descriptor{MediaType: OCILayer + "+gzip", Digest: DigestOf(fmt.Append(nil, i)), Size: 100}
		}
		return out
	}
	firstLayer := func(change func(*Descriptor)) func(_, manifest map[string]any) {
		return func(_, manifest map[string]any) {
			layers, _ := manifest["layers"].([]Descriptor) // as New made them
			layers = append([]Descriptor(nil), layers...)
			change(&layers[0])
			manifest["layers"] = layers
		}
	}
	config := func(change func(cfg map[string]any)) func(cfg, _ map[string]any) {
		return func(cfg, _ map[string]any) { change(cfg) }
	}
	text := func(body string) func(*Registry) string {
		return func(g *Registry) string {
			g.PutManifest(path, "1", OCIManifest, []byte(body))
			return path + ":1"
		}
	}
	return []Hostile{
		{Name: "10,000 layers", Code: "image_too_large", Set: sealed(30, func(_, m map[string]any) { m["layers"] = descriptors(10_000) })},
		{Name: "an index of 5,000 images", Code: "image_too_large", Set: func(g *Registry) string {
			g.PutManifest(path, "1", OCIIndex, JSON(map[string]any{"schemaVersion": 2, "mediaType": OCIIndex, "manifests": descriptors(5000)}))
			return path + ":1"
		}},
		{Name: "fewer diff_ids than layers", Code: "image_bad_manifest", Set: sealed(31, config(func(c map[string]any) { c["rootfs"] = map[string]any{"type": "layers", "diff_ids": []string{}} }))},
		{Name: "more diff_ids than layers", Code: "image_bad_manifest", Set: sealed(32, config(func(c map[string]any) {
			c["rootfs"] = map[string]any{"type": "layers", "diff_ids": []string{DigestOf(nil), DigestOf(nil), DigestOf(nil)}}
		}))},
		{Name: "wrong diff_ids", Code: "image_digest_mismatch", Set: sealed(33, config(func(c map[string]any) {
			c["rootfs"] = map[string]any{"type": "layers", "diff_ids": []string{DigestOf([]byte("a")), DigestOf([]byte("b"))}}
		}))},
		{Name: "diff_ids that lead elsewhere", Code: "image_bad_manifest", Set: sealed(34, config(func(c map[string]any) {
			c["rootfs"] = map[string]any{"type": "layers", "diff_ids": []string{"sha256:../../../etc/passwd", "upper:aaaaaaaaaaaaaaaaaaaaaaaaaa"}}
		}))},
		{Name: "a digest that leads elsewhere", Code: "image_bad_manifest", Set: sealed(35, firstLayer(func(d *Descriptor) { d.Digest = "sha256:../../../../etc/passwd" }))},
		{Name: "sha512", Code: "image_unsupported", Set: sealed(36, firstLayer(func(d *Descriptor) { d.Digest = "sha512:" + strings.Repeat("a", 128) }))},
		{Name: "a negative size", Code: "image_bad_manifest", Set: sealed(37, firstLayer(func(d *Descriptor) { d.Size = -5 }))},
		{Name: "a size beyond all bounds", Code: "image_too_large", Set: sealed(38, firstLayer(func(d *Descriptor) { d.Size = 1 << 60 }))},
		{Name: "a size that is too small", Code: "image_digest_mismatch", Set: sealed(39, firstLayer(func(d *Descriptor) { d.Size -= 10 }))},
		{Name: "a size that is too large", Code: "image_digest_mismatch", Set: sealed(40, firstLayer(func(d *Descriptor) { d.Size += 10 }))},
		{Name: "a Windows layer", Code: "image_unsupported", Set: sealed(41, firstLayer(func(d *Descriptor) { d.MediaType = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip" }))},
		{Name: "an encrypted layer", Code: "image_unsupported", Set: sealed(42, firstLayer(func(d *Descriptor) { d.MediaType = OCILayer + "+gzip+encrypted" }))},
		{Name: "no image but a chart", Code: "image_unsupported", Set: sealed(43, func(_, m map[string]any) {
			m["config"] = Descriptor{MediaType: "application/vnd.cncf.helm.config.v1+json", Digest: DigestOf([]byte("{}")), Size: 2}
		})},
		{Name: "for another machine", Code: "image_no_platform", Set: sealed(44, config(func(c map[string]any) { c["architecture"] = "s390x" }))},
		{Name: "an environment beyond all bounds", Code: "image_too_large", Set: sealed(45, config(func(c map[string]any) {
			c["config"] = map[string]any{"Env": []string{"A=" + strings.Repeat("x", 1<<20)}}
		}))},
		{Name: "a user that is no user", Code: "image_bad_manifest", Set: sealed(46, config(func(c map[string]any) { c["config"] = map[string]any{"User": "a/../b\n"} }))},
		{Name: "a configuration that is no JSON", Code: "image_bad_manifest", Set: func(g *Registry) string {
			m := New(47, 1, 100)
			d := Descriptor{MediaType: OCIConfig, Digest: m.Add([]byte("nope")), Size: 4}
			g.Put(path, "1", m.Seal(func(_, man map[string]any) { man["config"] = d }))
			return path + ":1"
		}},
		{Name: "a configuration with other bytes", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			m, name := image(g, 48, nil)
			d := DigestOf(m.Config)
			blobs(g, d, func(w http.ResponseWriter, _ *http.Request) bool {
				_, _ = w.Write(Noise(1, len(m.Config)))
				return true
			})
			return name
		}},
		{Name: "an endless configuration", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			m, name := image(g, 49, nil)
			blobs(g, DigestOf(m.Config), func(w http.ResponseWriter, r *http.Request) bool { pour(w, r); return true })
			return name
		}},
		{Name: "schema 1", Code: "image_unsupported", Set: text(`{"schemaVersion":1,"name":"x","tag":"1","architecture":"amd64","fsLayers":[{"blobSum":"` + DigestOf(nil) + `"}],"history":[{"v1Compatibility":"{}"}]}`)},
		{Name: "index and image at once", Code: "image_bad_manifest", Set: text(`{"schemaVersion":2,"manifests":[],"layers":[],"config":{}}`)},
		{Name: "neither index nor image", Code: "image_bad_manifest", Set: text(`{"schemaVersion":2}`)},
		{Name: "HTML", Code: "image_bad_manifest", Set: text(`<html>log in first</html>`)},
		{Name: "brackets without end", Code: "image_bad_manifest", Set: text(strings.Repeat("[", 1<<20))},
		{Name: "an index of an index of an index of an index", Code: "image_bad_manifest", Set: func(g *Registry) string {
			m, _ := image(g, 50, nil)
			b := m.Manifest
			for range 4 {
				d := Descriptor{MediaType: OCIIndex, Digest: DigestOf(b), Size: int64(len(b)), Platform: map[string]string{"os": "linux", "architecture": "amd64"}}
				b = JSON(map[string]any{"schemaVersion": 2, "mediaType": OCIIndex, "manifests": []Descriptor{d}})
				g.PutManifest(path, "1", OCIIndex, b)
			}
			return path + ":1"
		}},
		{Name: "an index that lies about a size", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			m, _ := image(g, 51, nil)
			d := m.Descriptor("linux", "amd64", "")
			d.Size++
			g.PutManifest(path, "1", OCIIndex, JSON(map[string]any{"schemaVersion": 2, "mediaType": OCIIndex, "manifests": []Descriptor{d}}))
			return path + ":1"
		}},
		{Name: "another manifest than the digest asked for", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			m, _ := image(g, 52, nil)
			digest := DigestOf([]byte("what was asked for"))
			g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.Header().Set("Content-Type", m.Kind)
					_, _ = w.Write(m.Manifest)
					return true
				}
				return false
			})
			return path + "@" + digest
		}},
		{Name: "another manifest than its header says", Code: "image_digest_mismatch", Set: func(g *Registry) string {
			m, name := image(g, 53, nil)
			g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.Header().Set("Docker-Content-Digest", DigestOf(nil))
					_, _ = w.Write(m.Manifest)
					return true
				}
				return false
			})
			return name
		}},
	}
}

// hostileAnswers break the protocol.
func hostileAnswers() []Hostile {
	return []Hostile{
		{Name: "a manifest without end", Code: "image_too_large", Set: manifests(pour)},
		{Name: "a manifest of 10 GiB", Code: "image_too_large", Set: manifests(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(int64(10)<<30))
			pour(w, r)
		})},
		{Name: "no such image", Code: "image_not_found", Set: func(*Registry) string { return path + ":none" }},
		{Name: "500 for ever", Code: "registry_unreachable", Set: manifests(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })},
		{Name: "429 for ever", Code: "registry_busy", Set: manifests(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) })},
		{Name: "500 three times", Set: func(g *Registry) string {
			_, name := image(g, 60, nil)
			var n atomic.Int32
			g.Meddle(func(w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1) > 3 {
					return false
				}
				w.WriteHeader(http.StatusInternalServerError)
				return true
			})
			return name
		}},
		{Name: "resets connections three times", Set: func(g *Registry) string {
			_, name := image(g, 61, nil)
			var n atomic.Int32
			g.Meddle(func(http.ResponseWriter, *http.Request) bool {
				if n.Add(1) <= 3 {
					cut()
				}
				return false
			})
			return name
		}},
		{Name: "circles", Code: "registry_refused", Set: manifests(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path+"?", http.StatusTemporaryRedirect)
		})},
		{Name: "circles for layers", Code: "registry_refused", Set: layer(62, func(_ *Image, _ []byte, w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
			return true
		})},
		{Name: "leads to a file", Code: "registry_unreachable", Set: layer(63, func(_ *Image, _ []byte, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Location", "file:///etc/passwd")
			w.WriteHeader(http.StatusTemporaryRedirect)
			return true
		})},
		{Name: "a length that is none", Code: "registry_unreachable", Set: raw("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx")},
		{Name: "a length beyond all numbers", Code: "registry_unreachable", Set: raw("HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nx")},
		{Name: "two lengths", Code: "registry_unreachable", Set: raw("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx")},
		{Name: "no HTTP", Code: "registry_unreachable", Set: raw("SSH-2.0-OpenSSH\r\n")},
		{Name: "a header without end", Code: "registry_unreachable", Set: raw("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n")},
		{Name: "private", Code: "image_unauthorized", Set: func(g *Registry) string {
			_, name := image(g, 64, nil)
			g.Protect("somebody:secret")
			return name
		}},
		{Name: "wants the token to be asked for at the metadata service", Code: "registry_refused", Set: func(g *Registry) string {
			g.Meddle(func(w http.ResponseWriter, _ *http.Request) bool {
				w.Header().Set("WWW-Authenticate", `Bearer realm="http://169.254.169.254/token",service="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return true
			})
			return path + ":1"
		}},
		{Name: "a token without end", Code: "registry_unreachable", Set: func(g *Registry) string {
			g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/token" {
					_, _ = io.WriteString(w, `{"token":"`)
					pour(w, r)
					return true
				}
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+g.URL+`/token",service="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return true
			})
			return path + ":1"
		}},
	}
}

// raw answers requests for manifests with bytes of its own.
func raw(answer string) func(*Registry) string {
	return manifests(func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, answer)
		_ = c.Close()
	})
}
