package launch

/*
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// libcontainer executes /proc/self/exe as a shell's first stage, whatever
// program that is, and in the directory of the shell's root. Where the small
// program for stages lies beside that root it takes over here: before the C
// constructor of libcontainer (whose priority is the lowest), before Go.
// See stageLink in skeleton.go.
static void __attribute__((constructor(101))) sandboxd_trampoline(int argc, char **argv, char **envp) {
	if (argc != 2 || strcmp(argv[1], "init") != 0 || getenv("_LIBCONTAINER_INITPIPE") == NULL)
		return;
	execve("../stage", argv, envp);
	if (errno == ENOENT) // none was given: this program is the stage
		return;
	perror("sandboxd: execute the program for a shell's first stage");
	_exit(125);
}
*/
import "C"
