"""A system-call filter for the sandbox: the calls that programs need, and no other.

Classic BPF over `struct seccomp_data` (nr at 0, arch at 4, low words of the first arguments at 16, 24, 32). Refused
calls answer EPERM; calls that are newer than the list answer ENOSYS, upon which the C library falls back to older ones,
as it does for clone3, whose flags a filter cannot see.

What is not here, and why: memory that no limit of a process counts (memfd_create, shmget, semget, msgget, mq_open,
F_SETPIPE_SZ, larger socket buffers), every socket but AF_UNIX, namespaces, mounts, other processes' memory, keys, bpf,
io_uring.
"""

import platform
import struct
from collections.abc import Iterable

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)
_NEW_NAMESPACE = 0x7E020080  # CLONE_NEW{USER,PID,NET,UTS,IPC,NS,CGROUP,TIME}
_AF_UNIX, _SOL_SOCKET, _SIZES_OF_BUFFERS, _F_SETPIPE_SZ = 1, 1, (7, 8, 32, 33), 1031
_NEWEST = 467  # the highest number that was looked at for this list

# name:x86-64:arm64, allowed whatever the arguments.
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291
lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286
pwritev2:328:287 access:21:- faccessat:269:48 faccessat2:439:439 pipe:22:- pipe2:293:59 dup:32:23 dup2:33:-
dup3:292:24 flock:73:32 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 syncfs:306:267 sync:162:81
truncate:76:45 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 readahead:187:213 getdents:78:-
getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:-
mkdirat:258:34 rmdir:84:- creat:85:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:-
symlinkat:266:36 readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452
chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 umask:95:166 utime:132:- utimes:235:- utimensat:280:88
futimesat:261:- mknod:133:- mknodat:259:33 openat:257:56 openat2:437:437 close_range:436:436
copy_file_range:326:285 sendfile:40:71 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 statfs:137:43 fstatfs:138:44 ioctl:16:29

mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233

poll:7:- ppoll:271:73 select:23:- pselect6:270:72 eventfd:284:- eventfd2:290:19 signalfd:282:- signalfd4:289:74
epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441
futex:202:98 futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456

rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
time:201:- times:100:153 getitimer:36:102 setitimer:38:103 alarm:37:- pause:34:- timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85
timerfd_settime:286:86 timerfd_gettime:287:87

fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
kill:62:129 tkill:200:130 tgkill:234:131 pidfd_open:434:434 pidfd_send_signal:424:424 set_tid_address:218:96
set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 membarrier:324:283 arch_prctl:158:- prctl:157:167
set_thread_area:205:- get_thread_area:211:- sched_yield:24:124 sched_getaffinity:204:123 sched_setaffinity:203:122
sched_getparam:143:121 sched_setparam:142:118 sched_getscheduler:145:120 sched_setscheduler:144:119
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 sched_getattr:315:275
getcpu:309:168 getpriority:140:141 setpriority:141:140 ioprio_get:252:31 getpid:39:172 getppid:110:173
gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 setresuid:117:147 setresgid:119:149 setgroups:116:159 getpgid:121:155 setpgid:109:154
getpgrp:111:- getsid:124:156 setsid:112:157 capget:125:90 capset:126:91 getrlimit:97:163 setrlimit:160:164
prlimit64:302:261 getrusage:98:165 sysinfo:99:179 uname:63:160 getrandom:318:278

connect:42:203 accept:43:202 accept4:288:242 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
sendmmsg:307:269 recvmmsg:299:243 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204
getpeername:52:205 getsockopt:55:209
"""
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_FCNTL, _SETSOCKOPT = (72, 25), (54, 208)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Instruction = tuple[int, int, int, int]  # operation, jump where true, jump where false, constant


def seccomp_filter() -> bytes | None:
    """The filter for this machine as `bwrap --seccomp` reads it; None on an architecture it is not written for."""
    if platform.machine() not in ARCHITECTURES:
        return None
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions(platform.machine()))


def allowed(machine: str) -> dict[str, int]:
    """Calls that are allowed whatever their arguments: their numbers by name."""
    column = ARCHITECTURES[machine][0]
    entries = [entry.split(":") for entry in _ALLOWED.split()]
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def instructions(machine: str) -> list[Instruction]:
    """The filter's program for a machine."""
    column, architecture = ARCHITECTURES[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture)]
    program += [(_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for low, high in _runs(allowed(machine).values()):
        program += [(_JUMP_AT_LEAST, 0, 2, low), (_JUMP_AT_LEAST, 1, 0, high + 1), (_RETURN, 0, 0, _ALLOW)]
    program += _where(_CLONE3[column], [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    program += _where(
        _CLONE[column],
        [(_LOAD, 0, 0, _ARGUMENTS[0]), (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE), refuse, (_RETURN, 0, 0, _ALLOW)],
    )
    family = [(_LOAD, 0, 0, _ARGUMENTS[0]), (_JUMP_EQUAL, 0, 1, _AF_UNIX), (_RETURN, 0, 0, _ALLOW)]
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        program += _where(number, [*family, (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT)])
    program += _where(
        _FCNTL[column],
        [(_LOAD, 0, 0, _ARGUMENTS[1]), (_JUMP_EQUAL, 0, 1, _F_SETPIPE_SZ), refuse, (_RETURN, 0, 0, _ALLOW)],
    )
    sizes = [instruction for size in _SIZES_OF_BUFFERS for instruction in ((_JUMP_EQUAL, 0, 1, size), refuse)]
    of_socket = [(_LOAD, 0, 0, _ARGUMENTS[1]), (_JUMP_EQUAL, 1, 0, _SOL_SOCKET), (_RETURN, 0, 0, _ALLOW)]
    program += _where(_SETSOCKOPT[column], [*of_socket, (_LOAD, 0, 0, _ARGUMENTS[2]), *sizes, (_RETURN, 0, 0, _ALLOW)])
    # Calls of the x32 convention and calls newer than the list are not there; all others are forbidden.
    return [*program, (_JUMP_AT_LEAST, 0, 1, _NEWEST + 1), (_RETURN, 0, 0, _ERRNO | _ENOSYS), refuse]


def _where(number: int, then: list[Instruction]) -> list[Instruction]:
    """Instructions for one call, which end with a verdict."""
    return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges, both ends included."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
