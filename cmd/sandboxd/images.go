package main

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"

	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

var (
	_ image.Volume    = volume{}
	_ runtime.Library = (*image.Store)(nil)
)

// volume shows package image the layers of package rootfs.
type volume struct{ *rootfs.Store }

func (v volume) Layer(name string) (image.Layer, error) { return layer(v.Store.Layer(name)) }

func (v volume) ImportLayer(ctx context.Context, diffID string, r io.Reader) (image.Layer, error) {
	return layer(v.Store.ImportLayer(ctx, diffID, r))
}

func layer(info rootfs.LayerInfo, err error) (image.Layer, error) {
	return image.Layer{Size: info.Size, Files: info.Files}, err
}

// registryConfig is what the operator says of one registry.
type registryConfig struct {
	Mirrors   []string `yaml:"mirrors"` // asked first
	PlainHTTP bool     `yaml:"plain_http"`
	CAFile    string   `yaml:"ca_file"`
	Username  string   `yaml:"username"`
	Password  string   `yaml:"password"`
}

// openLibrary opens what moves images.
func openLibrary(c config, roots *rootfs.Store, log *slog.Logger) (*image.Store, error) {
	registries := map[string]image.Registry{}
	for host, r := range c.Registries {
		out := image.Registry{Mirrors: r.Mirrors, PlainHTTP: r.PlainHTTP, CAFile: r.CAFile}
		if r.Username != "" || r.Password != "" {
			out.Auth = &sandbox.RegistryAuth{Username: r.Username, Password: r.Password}
		}
		registries[host] = out
	}
	return image.Open(image.Config{
		Dir: filepath.Join(c.StateDir, "images"), Volume: volume{roots}, Registries: registries,
		CacheBytes: int64(c.ImageCache), MaxBytes: int64(c.Volume.MaxBytes), Version: version, Log: log,
	})
}
