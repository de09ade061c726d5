package build

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/sandboxd/sandboxd/sandbox"
)

// environ is a set of variables.
type environ map[string]string

// Get implements the parser's interface.
func (e environ) Get(k string) (string, bool) { v, ok := e[k]; return v, ok }

// Keys implements the parser's interface.
func (e environ) Keys() []string { return slices.Sorted(maps.Keys(e)) }

// environOf reads K=V pairs.
func environOf(pairs []string) environ {
	e := environ{}
	for _, kv := range pairs {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			e[k] = v
		}
	}
	return e
}

// pairs lists the variables as K=V, sorted.
func (e environ) pairs() []string {
	out := make([]string, 0, len(e))
	for _, k := range e.Keys() {
		out = append(out, k+"="+e[k])
	}
	return out
}

// longest is the length of the longest value.
func (e environ) longest() (n int) {
	for _, v := range e {
		n = max(n, len(v))
	}
	return n
}

// expander expands variables by Docker's rules.
type expander struct {
	escape rune
	raw    bool // leave quotes alone, as in a heredoc
}

// maxExpansion bounds what one word may grow to: variables that name each
// other twice would double with every line.
const maxExpansion = 16 << 20

func (x expander) lex() *shell.Lex {
	escape := x.escape
	if escape == 0 || x.raw {
		escape = '\\'
	}
	l := shell.NewLex(escape)
	l.SkipProcessQuotes = x.raw
	return l
}

// check refuses words whose expansion could take the daemon's memory.
func (x expander) check(word string, env environ) error {
	refs := strings.Count(word, "$")
	worst := len(word) + refs*env.longest()
	if strings.Contains(word, "${") && strings.Contains(word, "/") { // ${x//a/b} puts b for every a
		worst *= max(1, len(word))
	}
	if refs > 0 && worst > maxExpansion {
		return fmt.Errorf("%.40q could expand to %d bytes: at most %d", word, worst, maxExpansion)
	}
	return nil
}

// word expands to one word.
func (x expander) word(word string, env environ) (string, error) {
	if err := x.check(word, env); err != nil {
		return "", err
	}
	out, _, err := x.lex().ProcessWord(word, env)
	return out, err
}

// words expands and splits.
func (x expander) words(word string, env environ) ([]string, error) {
	if err := x.check(word, env); err != nil {
		return nil, err
	}
	return x.lex().ProcessWords(word, env)
}

// proxyArgs can be given without an ARG: RUN steps see them, and neither the
// cache nor the image remembers them.
var proxyArgs = []string{
	"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "FTP_PROXY", "ftp_proxy",
	"NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy",
}

// bounded keeps an environment within what a sandbox takes.
func bounded(e environ) error { return sandbox.ValidateEnv(e) }
