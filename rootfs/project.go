package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Project ids are taken from here on: high, to stay clear of those a person
// writes into /etc/projid where the volume is not ours alone.
const (
	firstProject = 0x5b000000
	maxProjects  = 1 << 20
)

// projectIDs hands out project ids. An id is in use as long as a directory
// that carries it exists, in the trash too. The lowest free one is taken, for
// XFS keeps a quota record for good for every id it has ever seen.
type projectIDs struct {
	first uint32 // 0: firstProject
	usage func(id uint32) (bytes, inodes uint64, err error)

	mu   sync.Mutex // guards the rest
	used map[uint32]bool
}

// findProjectIDs reads the ids in use off the directories of the volume.
func (s *Store) findProjectIDs() (*projectIDs, error) {
	ids := &projectIDs{
		used:  map[uint32]bool{},
		usage: func(id uint32) (uint64, uint64, error) { return linux.ProjectUsage(s.vol.root, id) },
	}
	if s.cfg.Second {
		ids.first = firstProject + maxProjects
	}
	if !s.vol.quota {
		return ids, nil
	}
	for _, d := range []string{sandboxesDir, volumesDir, layersDir, trashDir} {
		names, err := readNames(s.vol.path(d))
		if err != nil {
			return nil, fmt.Errorf("rootfs: find project ids: %w", err)
		}
		for _, n := range names {
			path := filepath.Join(s.vol.path(d), n)
			if st, err := os.Lstat(path); err != nil || !st.IsDir() {
				continue // the trash may hold anything
			}
			id, err := projectOf(path)
			if err != nil {
				return nil, fmt.Errorf("rootfs: find project ids: %w", err)
			}
			if id != 0 {
				ids.used[id] = true
			}
		}
	}
	return ids, nil
}

// take returns an id that nothing counts under. Ids with usage are passed
// over: a deleted file that a process still holds open counts, too.
func (p *projectIDs) take() (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := max(p.first, firstProject)
	for id := first; id < first+maxProjects; id++ {
		if p.used[id] {
			continue
		}
		bytes, inodes, err := p.usage(id)
		if err != nil {
			return 0, fmt.Errorf("rootfs: usage of project %#x: %w", id, err)
		}
		if bytes != 0 || inodes != 0 {
			continue
		}
		p.used[id] = true
		return id, nil
	}
	return 0, sandbox.Errorf(sandbox.ErrExhausted, "no_project_id", "all %d quota ids are in use: remove sandboxes", maxProjects)
}

func (p *projectIDs) free(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, id)
}
