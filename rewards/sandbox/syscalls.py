"""System calls denied in the sandbox, as a seccomp BPF filter.

Namespaces hide the network and other processes, but some ways out remain. AF_VSOCK reaches a virtual machine's host
from any network namespace, System V memory is not covered by the address-space limit, and a new user namespace grants
the right to mount. Numbers: `linux/arch/x86/entry/syscalls/syscall_64.tbl`, `linux/include/uapi/asm-generic/unistd.h`;
format: `linux/Documentation/userspace-api/seccomp_filter.rst`.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: number on x86-64, number on arm64
_REFUSED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE3, _CLONE, _SOCKET = (435, 435), (56, 220), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW* that clone takes
_AF_UNIX = 1
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter() -> bytes:
    """Return the filter for this machine. Raises ValueError for a processor that is neither x86-64 nor arm64."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the sandbox knows no system calls of {machine}; it knows x86_64 and aarch64")
    column, architecture = _ARCHITECTURES[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in sorted(numbers[column] for numbers in _REFUSED.values()):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # The flags of clone3 are in memory, which a filter cannot read. On ENOSYS, glibc falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 3, _SOCKET[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
