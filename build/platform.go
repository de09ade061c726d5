package build

import (
	"runtime"
	"strings"
)

// hostPlatform is the one platform that can be built.
func hostPlatform() string { return runtime.GOOS + "/" + runtime.GOARCH }

// samePlatform tells whether a platform is the host's; a variant is as good
// as none.
func samePlatform(p string) bool {
	os, rest, ok := strings.Cut(strings.ToLower(strings.TrimSpace(p)), "/")
	if !ok {
		return os == runtime.GOARCH || os == runtime.GOOS
	}
	arch, _, _ := strings.Cut(rest, "/")
	switch arch {
	case "x86_64", "x86-64":
		arch = "amd64"
	case "aarch64":
		arch = "arm64"
	}
	return os == runtime.GOOS && arch == runtime.GOARCH
}

// platformArgs are the arguments Docker defines before the first FROM.
func platformArgs(target string) map[string]string {
	if target == "" {
		target = "default"
	}
	return map[string]string{
		"BUILDPLATFORM": hostPlatform(), "BUILDOS": runtime.GOOS, "BUILDARCH": runtime.GOARCH, "BUILDVARIANT": "",
		"TARGETPLATFORM": hostPlatform(), "TARGETOS": runtime.GOOS, "TARGETARCH": runtime.GOARCH, "TARGETVARIANT": "",
		"TARGETSTAGE": target,
	}
}
