package resolver

import (
	"container/list"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// answer is what upstream said to one question, trimmed to what we use.
type answer struct {
	rcode   int
	records []dns.RR // CNAMEs, and records of the type asked for; never changed
	final   bool     // says that there is nothing more, with the zone's SOA
	expires time.Time
}

// Bounds of the cache.
const (
	cacheEntries = 20000
	cacheBytes   = 16 << 20
	entryWeight  = 256 // of the bookkeeping of an entry
)

// cache holds answers, bounded in number and bytes; who was not asked for
// longest goes first.
type cache struct {
	mu      sync.Mutex
	order   *list.List // of *entry, the newest in front
	entries map[string]*list.Element
	bytes   int
	most    int // bytes
}

type entry struct {
	key    string
	answer answer
	bytes  int
}

func newCache(most int) *cache {
	return &cache{order: list.New(), entries: map[string]*list.Element{}, most: most}
}

// get returns an answer that has not expired.
func (c *cache) get(key string, now time.Time) (answer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.entries[key]
	if !ok {
		return answer{}, false
	}
	e := el.Value.(*entry) //nolint:errcheck // the list holds nothing else
	if !now.Before(e.answer.expires) {
		c.drop(el)
		return answer{}, false
	}
	c.order.MoveToFront(el)
	return e.answer, true
}

// put keeps an answer until it expires or the room is needed.
func (c *cache) put(key string, a answer) {
	e := &entry{key: key, answer: a, bytes: entryWeight + 2*len(key)}
	for _, rr := range a.records {
		e.bytes += 64 + dns.Len(rr)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if el, ok := c.entries[key]; ok {
		c.drop(el)
	}
	if e.bytes > c.most/16 { // one answer must not empty the cache
		return
	}
	c.entries[key] = c.order.PushFront(e)
	c.bytes += e.bytes
	for c.bytes > c.most || len(c.entries) > cacheEntries {
		c.drop(c.order.Back())
	}
}

// drop removes an entry. The lock is held.
func (c *cache) drop(el *list.Element) {
	e := c.order.Remove(el).(*entry) //nolint:errcheck // the list holds nothing else
	delete(c.entries, e.key)
	c.bytes -= e.bytes
}
