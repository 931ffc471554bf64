"""A system-call filter for the sandbox: what no tested program needs and the kernel's faults have hidden behind.

Classic BPF over `struct seccomp_data` (nr at 0, arch at 4, low word of the first argument at 16). Refused calls answer
EPERM; clone3, whose flags a filter cannot see, answers ENOSYS, upon which the C library falls back to clone.
"""

import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NEW_NAMESPACE = 0x7E020080  # CLONE_NEW{USER,PID,NET,UTS,IPC,NS,CGROUP,TIME}
_X32_BIT = 0x40000000

# Numbers by architecture: refused outright, then clone and clone3. Memory that no limit counts (memfd_create, shmget)
# is refused with the rest.
_CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def seccomp_filter() -> bytes | None:
    """The filter for this machine as `bwrap --seccomp` reads it; None on an architecture it is not written for."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[platform.machine()]
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if column == 0:
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for numbers in _CALLS.values():
        program += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    program += [(_JUMP_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    program += [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
