// Package netns is the networking of sandboxes: routed veth links, addresses,
// and the nf_tables policy that keeps sandboxes apart from everything.
package netns
