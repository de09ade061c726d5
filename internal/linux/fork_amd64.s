#include "textflag.h"

// func vforkSyscall(trap, a1, a2, a4, a5 uintptr) (r1, errno uintptr)
//
// As syscall.rawVforkSyscall: the return address is kept in a register, because
// the child runs on the same stack and returns first. The third and the sixth
// argument are 0.
TEXT ·vforkSyscall(SB),NOSPLIT|NOFRAME,$0-56
	MOVQ	a1+8(FP), DI
	MOVQ	a2+16(FP), SI
	MOVQ	$0, DX
	MOVQ	a4+24(FP), R10
	MOVQ	a5+32(FP), R8
	MOVQ	$0, R9
	MOVQ	trap+0(FP), AX
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	CMPQ	AX, $0xfffffffffffff001
	JLS	ok
	MOVQ	$-1, r1+40(FP)
	NEGQ	AX
	MOVQ	AX, errno+48(FP)
	RET
ok:
	MOVQ	AX, r1+40(FP)
	MOVQ	$0, errno+48(FP)
	RET
