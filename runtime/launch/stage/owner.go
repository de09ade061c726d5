package stage

/*
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <linux/securebits.h>

// The kernel charges what a user namespace has of inotify instances, message
// queues, pending signals and locked memory also to the user who made it
// (kernel/ucount.c). Made by root, all sandboxes and the host's root would share
// one account. So the first stage becomes the user that owns PID 1's socket,
// which is one of this sandbox alone, before libcontainer's constructor (whose
// priority is the lowest) makes the namespace. It keeps its capabilities; in the
// new namespace the secure bits are the default again (user_namespaces(7)).
static void __attribute__((constructor(102))) sandboxd_owner(int argc, char **argv) {
	struct sockaddr_un at = {0};
	socklen_t len = sizeof(at) - 1;
	struct stat st;
	if (argc != 2 || strcmp(argv[1], "init") != 0 || getenv("_LIBCONTAINER_INITPIPE") == NULL)
		return;
	if (getsockname(3, (struct sockaddr *)&at, &len) == 0 && stat(at.sun_path, &st) == 0 &&
	    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) == 0 && setresuid(-1, st.st_uid, -1) == 0)
		return;
	perror("sandboxd: become the user who makes a sandbox's user namespace");
	_exit(125);
}
*/
import "C"
