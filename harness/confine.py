"""What Linux takes from a process that is to run a planner's program: privileges, files, network, system calls. Used by sandbox_child.py.

A process goes through here once and cannot go back. Every function raises OSError where a step fails that the machine can do: a session
that is not confined must not start. All by ctypes, so that nothing has to be compiled or installed.

The filter of system calls is an allow-list. What is not on it returns EPERM, which Python shows as PermissionError; clone3, whose
arguments a filter cannot read, returns ENOSYS, and glibc then makes threads with clone. Two traps: fcntl can send signals to any process
of the same user (F_SETOWN, F_SETSIG), so only its plain commands pass; and the x32 numbers of x86-64 reach the same calls by other
numbers, so they are refused as a whole.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sys

NOBODY = 65534
MEMORY = 512 << 20      # bytes of address space above what a session starts with
CPU = 120               # s of CPU time in a session's life; each block has its own, shorter limit
FILE = 1 << 20          # bytes: largest file
FILES = 32              # open files
TASKS = 512             # threads of all sessions of one zygote; counted by the kernel where the zygote has its own namespace of users

# Names of system calls -> (number on x86-64, number on aarch64); None: it does not exist there.
ALWAYS = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "close": (3, 57), "poll": (7, None), "ppoll": (271, 73),
    "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "msync": (26, 227), "mincore": (27, 232),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "times": (100, 153), "getrusage": (98, 165), "getrandom": (318, 278), "uname": (63, 160),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "exit": (60, 93), "exit_group": (231, 94), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
    "membarrier": (324, 283), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "close_range": (436, 436), "getdents64": (217, 61), "getcwd": (79, 17), "umask": (95, 166),
    "select": (23, None), "pselect6": (270, 72),
}
# Calls that take a path: only where Landlock says which paths. stat and access do not open anything.
PATHS = {
    "openat": (257, 56), "open": (2, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276),
}
LOOKS = {
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439),
}
CHECKED = {
    "mmap": (9, 222), "mprotect": (10, 226), "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "tgkill": (234, 131),
    "prlimit64": (302, 261),
}
CLONE3 = (435, 435)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}      # column of the tables, AUDIT_ARCH
X32 = 0x40000000

CLONE_THREAD = 0x10000
CLONE_ELSE = 0x7E020000 | 0x80 | 0x2000 | 0x4000 | 0x8000       # namespaces, NEWTIME, PTRACE, VFORK, PARENT: no thread needs them
PROT_EXEC = 4
FCNTL = (0, 1, 2, 3, 4, 1030)                                   # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
IOCTL = (0x5450, 0x5451)                                        # FIONCLEX, FIOCLEX: Python asks it so when a file opens by an opener

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, ABOVE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446        # the same numbers on both machines
FS_WRITE, FS_READ, FS_LIST, FS_REMOVE, FS_MAKE, FS_TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}                 # ABI -> number of rights on files it knows; all are handled, so refused
UNSHARE = {"user": 0x10000000, "net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000}

_libc = ctypes.CDLL(None, use_errno=True)


def _try(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number, *args):
    return _libc.syscall(ctypes.c_long(number), *(ctypes.c_void_p(a) if isinstance(a, int) or a is None else a for a in args))


def _prctl(option, *args):
    numbers = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*args, 0, 0, 0, 0)[:4]]
    return _libc.prctl(ctypes.c_int(option), *numbers)


def layers():
    """What this machine can do, without doing it -> {"limits": True, "seccomp": bool, "landlock": ABI, 0 where absent}."""
    if sys.platform != "linux":
        return {"limits": True, "seccomp": False, "landlock": 0}
    seccomp = platform.machine() in MACHINES and sys.byteorder == "little" and _prctl(22, 2, None) < 0 \
        and ctypes.get_errno() == errno.EFAULT                  # PR_SET_SECCOMP with no filter: EFAULT says that filters exist
    return {"limits": True, "seccomp": seccomp, "landlock": max(0, _syscall(LANDLOCK_CREATE, None, 0, 1))}


# ---------------------------------------------------------------------------------------------- once, in the zygote

def leave_power():
    """Leaves network, capabilities and, if need be, root behind -> whether namespaces do it (the machine may refuse them)."""
    apart = _libc.unshare(sum(UNSHARE.values())) == 0
    if apart:
        _libc.sethostname(b"sandbox", 7)                        # not everywhere allowed, and then harmless
    elif os.getuid() == 0:
        with contextlib.suppress(PermissionError):              # a root without any power, in a container, stays as it is
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    return apart


def drop_capabilities():
    """No capability is left, not even those in a namespace of its own."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _try(_libc.capset(header, nothing), "capset")


def address_space():
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


# ---------------------------------------------------------------------------------------------- in each session

def limit(memory, apart):
    """Limits of the kernel. memory: bytes of address space, None where the machine cannot (macOS). apart: of leave_power()."""
    limits = {"CPU": (CPU, CPU + 1), "FSIZE": FILE, "NOFILE": FILES, "CORE": 0}
    if memory:
        limits |= {"AS": memory, "STACK": 8 << 20, "MEMLOCK": 0, "MSGQUEUE": 0}
    if apart:
        limits["NPROC"] = TASKS                                 # elsewhere it counts all processes of the user, ours and others'
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        soft, hard = value if isinstance(value, tuple) else (value, value)
        top = resource.getrlimit(number)[1]
        if top != resource.RLIM_INFINITY:
            soft, hard = min(soft, top), min(hard, top)
        resource.setrlimit(number, (soft, hard))


def die_with_parent(parent):
    """SIGKILL once the parent (a pid) ends. Before anything that could run for ever."""
    if sys.platform == "linux":
        _try(_prctl(1, 9), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)                                             # it ended before the call above


def no_new_privileges():
    _try(_prctl(38, 1), "PR_SET_NO_NEW_PRIVS")
    _try(_prctl(4, 0), "PR_SET_DUMPABLE")


def landlock(abi, readable, scratch):
    """Files under `readable` for reading, files right in `scratch` for writing, nothing else; no TCP; no signals to the outside."""
    rights = (1 << FS_RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8            # an older kernel refuses a longer structure
    ruleset = _try(_syscall(LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    change = FS_WRITE | FS_READ | FS_LIST | FS_REMOVE | FS_MAKE | (FS_TRUNCATE if abi >= 3 else 0)
    for path, access in [*((p, FS_READ | FS_LIST) for p in readable), (scratch, change)]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except PermissionError:
            if path == scratch:
                raise
            continue                                            # of another user since leave_power(): out of reach anyway
        if not os.path.isdir(path):
            access &= FS_READ
        rule = struct.pack("=Qi", access, fd)
        _try(_syscall(LANDLOCK_ADD, ruleset, 1, rule, 0), "landlock_add_rule")
        os.close(fd)
    _try(_syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _op(code, value, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


def _where(number, *conditions):
    """The call passes if half & mask is one of values, for each (half, mask, values). half: 2 × argument, + 1 for its upper 32 bits."""
    body = []
    for half, mask, values in conditions:
        body += [_op(LOAD, 16 + 4 * half), _op(AND, mask)]
        body += [_op(EQUAL, v, yes=len(values) - k) for k, v in enumerate(values)]          # a match jumps over the refusal
        body += [_op(RETURN, ERRNO | errno.EPERM)]
    body.append(_op(RETURN, ALLOW))
    return [_op(EQUAL, number, no=len(body)), *body]


def filter_program(machine, pid, files):
    """The filter as bytes of classic BPF. pid: of the process it is for; files: whether files may be opened (Landlock says which)."""
    column, arch = MACHINES[machine]
    program = [_op(LOAD, 4), _op(EQUAL, arch, yes=1), _op(RETURN, KILL), _op(LOAD, 0)]
    if machine == "x86_64":
        program += [_op(ABOVE, X32, no=1), _op(RETURN, ERRNO | errno.EPERM)]
    for numbers in (ALWAYS | LOOKS | (PATHS if files else {})).values():
        if numbers[column] is not None:
            program += [_op(EQUAL, numbers[column], no=1), _op(RETURN, ALLOW)]
    number = {name: numbers[column] for name, numbers in CHECKED.items()}
    program += _where(number["mmap"], (4, PROT_EXEC, [0]))
    program += _where(number["mprotect"], (4, PROT_EXEC, [0]))
    program += _where(number["clone"], (0, CLONE_THREAD | CLONE_ELSE, [CLONE_THREAD]))
    program += _where(number["fcntl"], (2, 0xFFFFFFFF, FCNTL))
    program += _where(number["ioctl"], (2, 0xFFFFFFFF, IOCTL))
    program += _where(number["tgkill"], (0, 0xFFFFFFFF, [pid]))
    program += _where(number["prlimit64"], (0, 0xFFFFFFFF, [0]), (4, 0xFFFFFFFF, [0]), (5, 0xFFFFFFFF, [0]))    # reading its own
    program += [_op(EQUAL, CLONE3[column], no=1), _op(RETURN, ERRNO | errno.ENOSYS), _op(RETURN, ERRNO | errno.EPERM)]
    return b"".join(program)


def seccomp(files):
    """From here on only the calls of the list. files: see filter_program()."""
    code = filter_program(platform.machine(), os.getpid(), files)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _try(_prctl(22, 2, program), "PR_SET_SECCOMP")
    if _libc.kill(os.getpid(), 0) != -1:                        # a filter that filters nothing must not pass for one
        raise OSError(errno.EPERM, "the filter of system calls does not act")
