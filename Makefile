# Everything a developer or a CI machine does with sandboxd. `make` lists it.
#
# Needs a Debian 12 or later with Go, gcc, git and make. A target that needs
# Debian packages installs them when it runs as root, else says which.

SHELL         := /bin/bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
PREFIX  ?= /usr/local
DESTDIR ?=

# For one lane at a time: make test-vm PKG=./cgroup RUN=TestFreeze KEEP=1
PKG  ?= ./...
RUN  ?=
KEEP ?=

OUT     := .cache/test
TOOLS   := $(CURDIR)/.cache/bin
BIN     := $(CURDIR)/bin
INITBIN := cmd/sandboxd/initbin
LDFLAGS := -s -w -X main.version=$(VERSION)
GOBUILD := go build -ldflags '$(LDFLAGS)'
# Each shell starts both programs with C in them; without a loader to find and
# bind libraries that takes 2 ms of cpu less.
GOSTATIC := go build -tags netgo,osusergo,sqlite_omit_load_extension -ldflags '$(LDFLAGS) -linkmode external -extldflags -static'

GOTESTSUM     := gotest.tools/gotestsum@v1.13.0
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOFUMPT       := mvdan.cc/gofumpt@v0.12.0
# The last version whose modules can all be had.
NFPM          := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.44.0
BENCHSTAT     := golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da

DEPS_BUILD := gcc libc6-dev libseccomp-dev pkg-config
DEPS_RUN   := iproute2 nftables xfsprogs e2fsprogs util-linux procps kmod
DEPS_TEST  := iperf3 iptables mount nftables iputils-ping netcat-openbsd python3-minimal strace quota umoci docker-registry skopeo busybox-static
DEPS_BENCH := runc crun bubblewrap busybox-static tar
DEPS_VM    := qemu-system-x86 qemu-utils vagrant vagrant-libvirt libvirt-daemon-system libvirt-clients \
              dnsmasq-base mmdebstrap e2fsprogs rsync openssh-client procps util-linux iproute2

# What the lanes promise their tests; a promised feature that is missing fails
# (internal/testenv). A native run promises little: machines differ.
ROOT_PROMISES ?= root
VM_PROMISES   ?= root,cgroup2,cgroup,userns,overlay,xfs,quota,landlock,nft,netem,systemd

# Packages with tests that need root.
root_packages = $(shell git grep -l --untracked '^//go:build root$$' -- '*_test.go' | xargs -rn1 dirname | sort -u | sed 's|^|./|')
ROOT_PKG      = $(if $(filter ./...,$(PKG)),$(root_packages),$(PKG))

export CGO_ENABLED := 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- build ------------------------------------------------------------------

.PHONY: build
build: deps-build ## build bin/sandboxd and bin/sandbox, and what runs in sandboxes
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GOBUILD) -o $(BIN)/sandbox-init ./cmd/sandbox-init
	$(GOSTATIC) -o $(BIN)/sandbox-shell ./cmd/sandbox-shell
	@for p in sandbox-init sandbox-shell; do cmp -s $(BIN)/$$p $(INITBIN)/$$p || cp $(BIN)/$$p $(INITBIN)/$$p; done
	$(GOSTATIC) -o $(BIN)/sandboxd ./cmd/sandboxd
	CGO_ENABLED=0 $(GOBUILD) -o $(BIN)/sandbox ./cmd/sandbox

.PHONY: run
run: build deps-run ## start a daemon in a scratch directory, show a sandbox, clean up
	@SANDBOXD_BIN=$(BIN) scripts/demo.sh

.PHONY: install
install: build ## install programs, unit, man pages, completions (PREFIX, DESTDIR)
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' scripts/install.sh

.PHONY: deb
deb: build $(TOOLS)/nfpm ## pack dist/sandboxd_VERSION_ARCH.deb
	@scripts/deb.sh $(TOOLS)/nfpm '$(VERSION)' dist

.PHONY: clean
clean: ## remove what was built, and the VM
	@integration/vm/vm.sh down
	rm -rf bin dist .cache $(INITBIN)/sandbox-init $(INITBIN)/sandbox-shell

# --- test -------------------------------------------------------------------

.PHONY: test
test: ## all three test lanes, each to its end, then a summary
	@rm -rf $(OUT); failed=; \
	for lane in unit root vm; do \
	  $(MAKE) --no-print-directory test-$$lane || failed="$$failed test-$$lane"; \
	done; \
	scripts/test-summary.sh $(OUT)/unit.json $(OUT)/root.json $(OUT)/vm.json || failed="$$failed summary"; \
	[ -z "$$failed" ] || { echo "FAIL:$$failed"; exit 1; }

.PHONY: sdk
sdk: sdk/js/node_modules ## write the types of the JavaScript client from the daemon's own document
	SANDBOXD_OPENAPI_OUT=$(CURDIR)/sdk/js/openapi.json go test ./api/server -run 'TestOpenAPI$$' -count 1
	cd sdk/js && npm run --silent generate && npm run --silent check

sdk/js/node_modules: sdk/js/package-lock.json
	cd sdk/js && npm ci --no-audit --no-fund --ignore-scripts && touch node_modules

# The SDK and the command line of E2B, pinned, for integration.TestE2B; without
# npm that test is skipped.
.PHONY: deps-e2b
deps-e2b:
	@if command -v npm > /dev/null; then $(MAKE) --no-print-directory integration/e2b/node_modules; else echo 'no npm: TestE2B will be skipped'; fi

integration/e2b/node_modules: integration/e2b/package-lock.json
	cd integration/e2b && npm ci --silent --no-audit --no-fund --ignore-scripts && touch node_modules

.PHONY: test-unit
test-unit: build $(TOOLS)/gotestsum ## tests that need neither root nor a particular kernel
	@mkdir -p $(OUT); echo '== test-unit'
	@$(TOOLS)/gotestsum --format pkgname --jsonfile $(OUT)/unit.json -- -timeout 10m -run '$(RUN)' $(PKG)

.PHONY: test-race
test-race: build ## the tests of test-unit under the race detector; 10 minutes, no part of test
	@go test -race -timeout 30m -run '$(RUN)' $(PKG)

ROOT_TIMEOUT ?= 40m
.PHONY: test-root
test-root: build deps-run deps-test deps-e2b $(TOOLS)/gotestsum ## tests that need root, on this machine, in namespaces of their own
	@[ "$$(id -u)" = 0 ] || { echo 'make test-root needs root; make test-vm runs the same tests in a VM' >&2; exit 1; }
	@mkdir -p $(OUT); echo '== test-root'
	@SANDBOXD_BIN=$(BIN) SANDBOXD_TEST_PROMISES=$${SANDBOXD_TEST_PROMISES:-$(ROOT_PROMISES)} \
	  $(TOOLS)/gotestsum --format pkgname --jsonfile $(OUT)/root.json -- \
	  -tags root -count 1 -p 2 -timeout $(ROOT_TIMEOUT) -exec $(CURDIR)/scripts/isolate.sh -run '$(RUN)' $(ROOT_PKG)

.PHONY: test-vm
test-vm: build deps-vm $(TOOLS)/gotestsum $(TOOLS)/nfpm ## the same in a Debian 12 VM, with every cgroup v2 controller and quotas (KEEP=1 keeps it)
	@mkdir -p $(OUT); echo '== test-vm'
	@SANDBOXD_TEST_PROMISES=$(VM_PROMISES) KEEP='$(KEEP)' RUN='$(RUN)' integration/vm/lane.sh $(ROOT_PKG) \
	  | $(TOOLS)/gotestsum --format pkgname --jsonfile $(OUT)/vm.json --raw-command -- cat

.PHONY: soak
soak: ## test-root with the repeated tests at full length (SANDBOXD_SOAK_CYCLES), and the Debian package in the VM
	@SANDBOXD_SOAK=1 $(MAKE) --no-print-directory test-root ROOT_TIMEOUT=8h
	@$(MAKE) --no-print-directory test-vm PKG=./integration RUN='^TestPackage$$'

REDTEAM_MINUTES ?= 30
.PHONY: redteam
redteam: build deps-run deps-test ## attack the built programs: every probe of a wall or a fault at full length, random order (REDTEAM_MINUTES, REDTEAM_SEED, RUN)
	@[ "$$(id -u)" = 0 ] || { echo 'make redteam needs root: run it as root' >&2; exit 1; }
	@SANDBOXD_BIN=$(BIN) RUN='$(RUN)' scripts/redteam.sh $(REDTEAM_MINUTES)

# Every fuzz target, one after another.
FUZZTIME ?= 60s
.PHONY: fuzz
fuzz: build ## run every fuzz target for FUZZTIME (60s)
	@git grep -o --untracked '^func Fuzz[A-Za-z0-9_]*' -- '*_test.go' | sed 's|/[^/]*:func | |; s|^|./|' | while read -r pkg target; do \
	  echo "== $$pkg $$target"; go test -tags root -run '^$$' -fuzzminimizetime 2s -fuzz "^$$target$$" -fuzztime $(FUZZTIME) "$$pkg"; \
	done

# BENCH_FLAGS: -quick, -only SCENARIO,…, -results DIR, -scratch DIR.
BENCH_FLAGS ?=
.PHONY: bench
bench: build deps-run deps-bench ## measure sandboxd beside runc, crun and bubblewrap (BENCH_FLAGS=-quick); 20 minutes, as root
	@$(GOBUILD) -o $(BIN)/bench ./bench
	@$(BIN)/bench -bin $(BIN) $(BENCH_FLAGS)

.PHONY: bench-vm
bench-vm: build deps-vm ## the same in a Debian 12 VM, where every limit is enforced; emulated, only ratios count (KEEP=1 keeps it)
	@$(GOBUILD) -o $(BIN)/bench ./bench
	@KEEP='$(KEEP)' integration/vm/bench.sh bench/results $(BENCH_FLAGS)

BENCHCOUNT ?= 6
.PHONY: bench-go
bench-go: build deps-run $(TOOLS)/benchstat ## run the packages' benchmarks, print medians (BENCHCOUNT, RUN, PKG); those of the kernel need root
	@mkdir -p $(OUT)
	pkgs="$$(git grep -l --untracked '^func Benchmark' -- $(patsubst %/...,%,$(PKG)) | xargs -n1 dirname | sort -u | sed 's|^|./|')"; \
	SANDBOXD_BIN=$(BIN) go test -tags "$$([ "$$(id -u)" != 0 ] || echo root)" -p 1 -count $(BENCHCOUNT) -run '^$$' -bench '$(or $(RUN),.)' -benchmem \
	  $$([ "$$(id -u)" != 0 ] || echo -exec $(CURDIR)/scripts/isolate.sh) $$pkgs | tee $(OUT)/bench.txt
	$(TOOLS)/benchstat $(OUT)/bench.txt

# --- lint -------------------------------------------------------------------

.PHONY: lint
lint: build $(TOOLS)/golangci-lint ## golangci-lint, with and without the root tests
	$(TOOLS)/golangci-lint run --build-tags root $(PKG)

.PHONY: format
format: $(TOOLS)/gofumpt ## gofumpt every Go file
	git ls-files '*.go' | xargs $(TOOLS)/gofumpt -w

# --- tools and packages -----------------------------------------------------

# Pinned above; each is built once per checkout, and again when the pin moves.
$(TOOLS)/gotestsum: module = $(GOTESTSUM)
$(TOOLS)/golangci-lint: module = $(GOLANGCI_LINT)
$(TOOLS)/gofumpt: module = $(GOFUMPT)
$(TOOLS)/benchstat: module = $(BENCHSTAT)
$(TOOLS)/nfpm: module = $(NFPM)
$(TOOLS)/gotestsum $(TOOLS)/golangci-lint $(TOOLS)/gofumpt $(TOOLS)/benchstat $(TOOLS)/nfpm: Makefile
	@go version -m $@ 2>/dev/null | awk '$$1 == "path" {p=$$2} $$1 == "mod" {v=$$3} END {exit p"@"v != "$(module)"}' \
	  || GOBIN=$(TOOLS) CGO_ENABLED=0 go install $(module)
	@touch $@

.PHONY: deps
deps: deps-build deps-run deps-test deps-bench deps-vm ## install the Debian packages of every target

.PHONY: deps-build deps-run deps-test deps-bench deps-vm
deps-build:
	@scripts/deps.sh $(DEPS_BUILD)
deps-run:
	@scripts/deps.sh $(DEPS_RUN)
deps-test:
	@scripts/deps.sh $(DEPS_TEST)
deps-bench:
	@scripts/deps.sh $(DEPS_BENCH)
deps-vm:
	@if [ "$$(id -u)" = 0 ]; then scripts/deps.sh $(DEPS_VM); fi # elsewhere any vagrant will do
