package api

import "github.com/sandboxd/sandboxd/sandbox"

// PortList lists published ports.
type PortList struct {
	Items []sandbox.Port `json:"items"`
}

// PortToken is the token that opens a sandbox's host names.
type PortToken struct {
	Token string `json:"token" doc:"Shown this once; the daemon keeps a hash."`
}

// UpgradePort is the protocol a connection to a port is switched to (RFC 9110,
// 7.8): from there on it is the sandbox's, byte for byte.
const UpgradePort = "sandbox-port"
