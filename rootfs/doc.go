// Package rootfs keeps what sandboxes see as their files: read-only layers,
// one writable upper a sandbox, disk quotas on the uppers, and the overlay
// mount that joins them. It imports tar archives and the layers of OCI images
// as layers, and generates the layer of the host image.
//
// Everything lies on one volume beneath the state directory:
//
//	volume/layers/<sha256>/{root,layer.json}   imported: immutable, shared
//	volume/layers/upper-<random>/upper         a frozen upper: the same
//	volume/sandboxes/<id>/{upper,work}         one sandbox's own
//	volume/volumes/<name>/data                 a named volume, shared by who mounts it
//	volume/staging/<random>/                   an import or a copy on its way
//	volume/trash/                              emptied in the background
//	volume/skeleton/                           mount points, for stacks that lack them
//
// Files keep ids 0-65535 on disk; a mount maps them into the range of one
// sandbox. Set-id bits and file capabilities of images are kept and do nothing:
// the volume lies beneath a directory only root may enter, its mounts are nosuid,
// and in a sandbox no_new_privs is on. The volume is mounted in the caller's mount namespace, which must
// be private: nothing here is visible to the rest of the host.
//
// The package does not run or enter sandboxes, never follows a name a sandbox
// or an archive chose, and keeps no records of which sandbox uses which layer:
// runtime, its only caller, knows that and removes layers nobody uses.
package rootfs
