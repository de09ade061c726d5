package netns

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Obstacle is a chain of the host's own firewall that drops what is forwarded
// for sandboxes: in netfilter a packet passes only if every table lets it.
type Obstacle struct {
	Family string // as nft names it: ip, inet
	Table  string
	Chain  string
	// Links are the matches no rule of the table accepts: iifname, oifname.
	Links []string
	// Docker tells that the chain asks DOCKER-USER first, which is where rules
	// outlive Docker's own changes.
	Docker bool
}

// Accept returns the commands that let sandboxes through, in the language the
// chain is usually kept in.
func (o Obstacle) Accept() []string {
	var out []string
	for _, l := range o.Links {
		if o.Family == "ip" && o.Table == "filter" { // iptables'
			chain := o.Chain
			if o.Docker {
				chain = dockerUser
			}
			out = append(out, fmt.Sprintf("iptables -I %s -%c %s+ -j ACCEPT", chain, l[0], linkPrefix))
			continue
		}
		out = append(out, fmt.Sprintf("nft 'insert rule %s %s %s %s \"%s*\" accept'", o.Family, o.Table, o.Chain, l, linkPrefix))
	}
	return out
}

const dockerUser = "DOCKER-USER"

// Obstacles looks at the forward chains of the other nf_tables tables, among
// them those of iptables-nft and Docker. It judges by the rules it can read:
// one that accepts sandboxes by a set of names, say, it does not see. The rules
// of old iptables (legacy) are in no table.
func Obstacles() ([]Obstacle, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("opening nf_tables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("listing nf_tables chains: %w", err)
	}
	var out []Obstacle
	for _, base := range chains {
		if !forwards(base) {
			continue
		}
		var rules []*nftables.Rule
		docker := false
		for _, c := range chains {
			if c.Table.Name != base.Table.Name || c.Table.Family != base.Table.Family {
				continue
			}
			docker = docker || c.Name == dockerUser
			some, err := conn.GetRules(c.Table, c)
			if err != nil {
				return nil, fmt.Errorf("listing the rules of chain %s of table %s: %w", c.Name, c.Table.Name, err)
			}
			rules = append(rules, some...)
		}
		if links := blocked(base, rules); len(links) > 0 {
			out = append(out, Obstacle{Family: familyNames[base.Table.Family], Table: base.Table.Name, Chain: base.Name, Links: links, Docker: docker})
		}
	}
	return out, nil
}

var familyNames = map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyINet: "inet"}

// forwards tells of a foreign chain that decides about forwarded IPv4.
func forwards(c *nftables.Chain) bool {
	return c.Type == nftables.ChainTypeFilter && c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward &&
		familyNames[c.Table.Family] != "" && (c.Table.Family != nftables.TableFamilyINet || c.Table.Name != tableName)
}

// blocked returns the matches of sandboxes' links that no rule of the table
// accepts, where the base chain drops what no rule accepts.
func blocked(base *nftables.Chain, rules []*nftables.Rule) []string {
	drops := base.Policy != nil && *base.Policy == nftables.ChainPolicyDrop
	missing := []string{"iifname", "oifname"}
	for _, r := range rules {
		link, verdict := readRule(r.Exprs)
		if link == "" && verdict == expr.VerdictDrop && r.Chain.Name == base.Name {
			drops = true
		}
		if link != "" && verdict == expr.VerdictAccept {
			missing = slices.DeleteFunc(missing, func(m string) bool { return m == link })
		}
	}
	if !drops {
		return nil
	}
	return missing
}

// readRule reads a rule that does nothing but accept or drop, either
// everything or what comes in (iifname) or goes out (oifname) by the links of
// sandboxes. Of all others the verdict is to go on.
func readRule(exprs []expr.Any) (link string, verdict expr.VerdictKind) {
	register := ""
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Counter, *expr.Log:
		case *expr.Meta:
			switch e.Key {
			case expr.MetaKeyIIFNAME:
				register = "iifname"
			case expr.MetaKeyOIFNAME:
				register = "oifname"
			default:
				return "", expr.VerdictContinue
			}
		case *expr.Cmp:
			if register == "" || e.Op != expr.CmpOpEq || link != "" || !meansSandboxes(e.Data) {
				return "", expr.VerdictContinue
			}
			link = register
		case *expr.Reject:
			return link, expr.VerdictDrop
		case *expr.Verdict:
			return link, e.Kind
		default:
			return "", expr.VerdictContinue
		}
	}
	return "", expr.VerdictContinue
}

// meansSandboxes tells of the beginning of a link's name that all sandboxes'
// links share. Whole names end with a zero.
func meansSandboxes(prefix []byte) bool {
	return !bytes.Contains(prefix, []byte{0}) && strings.HasPrefix(linkPrefix, string(prefix))
}
