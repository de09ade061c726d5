// Package gate is the daemon's web gate: the web traffic of sandboxes whose
// policy asks for it (TCP to ports 80 and 443) is led here by the rules of
// netns, judged by name, method and path, and sent on by the daemon. The
// daemon's main program runs it and introduces it to who knows sandboxes,
// names and secrets.
//
//	sandbox ──TCP 80──▶ HTTP: each request judged alone ──▶ an address of the name
//	        ──TCP 443─▶ TLS: the hello's server name judged ─▶ an address of the name
//	                                                            (bytes passed on unread)
//
// Who asks is told by the source address, which the rules of netns guarantee,
// and what was dialed by SO_ORIGINAL_DST. The address a sandbox chose counts
// only where an allow rule names that address: otherwise the gate looks the
// name up itself and dials what it finds. So a name that is permitted cannot
// be used as a cloak for an address that is not.
//
// What it judges is what it sends: a host, path or header that two servers
// could read in two ways is refused, not guessed. net/http takes a request
// apart and writes it anew, which ends most ways of smuggling one request in
// another. Each client connection has upstream connections of its own, so that
// no sandbox gets the answers, or the logins, of another.
//
// It does not decrypt TLS. Of a TLS connection it knows the name the client
// says it wants; a server that serves many names behind one may be asked for
// another one inside the encryption. It speaks no HTTP/2 and no HTTP/3 (UDP
// port 443 is a matter of the rules of netns). It keeps nothing on disk, and
// its connections end with the daemon.
package gate
