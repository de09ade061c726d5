// Package image moves images in and out: from and to registries (the OCI
// distribution and Docker's v2 protocol), OCI layouts, archives of docker save.
//
// Everything that comes from a registry is verified before it is used: the
// manifest, the configuration and each compressed layer against its digest and
// size, the unpacked layer against the digest in the configuration. What a
// registry sends beyond the size in the manifest is never read.
//
// Beneath its directory lie
//
//	manifests/<sha256>   of pulled images, as they came
//	configs/<sha256>     their configurations
//	blobs/<layer>        what a layer is called in registries, to push it again without sending it
//	partial/<sha256>     compressed layers on their way, continued where they broke
//	spool/<random>/      an archive being read or written, of a live process only
//
// It never touches the kernel and does not know how layers are kept: it meets
// the volume through the interface Volume. It writes no rows: runtime, its only
// caller, does, after everything an image needs is in place.
package image
