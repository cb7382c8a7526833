"""What confines a sandbox session on this machine, what happens where a layer is missing, how processes end, and what passes as a frame."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from test_sandbox import SPECS, alive, linux, reply, wait_until

from harness import confine, sandbox, sandbox_link
from harness.sandbox import Sandbox


# ---------------------------------------------------------------------------------------------- processes

@pytest.fixture
def session():
    box = Sandbox()
    s = box.session(SPECS)
    yield s
    box.close()
    s.close()


@linux
def test_all_layers_act_here(session):
    """On a kernel that has them: the machines that we test on do."""
    box = session.sandbox
    assert box.layers["limits"] and box.layers["seccomp"] and box.layers["landlock"] == confine.layers()["landlock"]


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="only root sees the files of a process that is closed to others")
def test_the_zygote_inherits_nothing(session):
    zygote = session.process.zygote
    pid = zygote.process.pid
    environment = [v for v in session.run("import os\nprint(*os.environ)", reply).stdout.split()]
    assert set(environment) <= {"LANG", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", *sandbox_link.ENVIRONMENT}
    links = sorted(os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd"))
    assert [link.split(":")[0] for link in links] == ["/dev/null"] * 3 + ["socket"]
    links = sorted(os.readlink(f"/proc/{session.process.pid}/fd/{n}").split(":")[0] for n in os.listdir(f"/proc/{session.process.pid}/fd"))
    assert links == ["/dev/null"] * 3 + ["pipe"] * 2 + ["socket"]
    assert os.getpgid(pid) == os.getpgid(session.process.pid) == os.getpgrp()


@linux
@pytest.mark.parametrize("running", [False, True])
def test_a_dead_zygote_takes_its_sessions_along_and_is_replaced(running):
    """The block fails as the sandbox's fault, not as the program's; the worker's next session is a good one."""
    box = Sandbox()
    s = box.session(SPECS)
    s.run("x = 1", reply)
    pid, zygote = s.process.pid, box.zygote.process

    def end(*_):
        zygote.kill()
        assert wait_until(lambda: not alive(pid))
    if not running:
        end()
    with pytest.raises(RuntimeError, match="has ended|Broken pipe"):
        s.run("echo()", end)
    assert s.run("print('x' in globals())", reply).stdout == "False\n"
    other = box.session(SPECS)
    assert other.run("print('again')", reply).stdout == "again\n" and box.zygote.process is not zygote
    other.close()
    s.close()
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.session(SPECS)


@linux
@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.killpg(0, 9)"])
def test_nothing_outlives_the_worker(end, tmp_path):
    code = ("import os, threading\nfrom harness.sandbox import Sandbox\nb = Sandbox()\ns = b.session([])\ns.run('x = 1', None)\n"
            "print(b.zygote.process.pid, s.process.pid, flush=True)\n"
            "t = threading.Thread(target=s.run, args=('while True: pass', None))\nt.start()\nimport time; time.sleep(0.1)\n" + end)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, timeout=60,
                         env={**os.environ, "TMPDIR": str(tmp_path)})
    pids = [int(n) for n in out.stdout.split()]
    assert len(pids) == 2, out
    assert wait_until(lambda: not any(alive(p) for p in pids))


@linux
def test_sessions_leave_nothing_open(session):
    """File descriptors here and in the zygote, and zombies, after sessions that end in all the ways there are."""
    zygote = session.process.zygote.process.pid
    count = lambda: (len(os.listdir("/proc/self/fd")), Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())
    before = count()
    for code in ("x = 1", "import os; os._exit(0)", "import ctypes; ctypes.string_at(0)", "while True: pass", "import os; os.close(3)", "1 / 0"):
        s = session.sandbox.session(SPECS)
        s.run(code, reply, cpu_seconds=0.1)
        s.close()
    session.sandbox.session(SPECS).close()
    assert count() == before


@linux
def test_closing_ends_all_sessions():
    box = Sandbox()
    sessions = [box.session(SPECS) for _ in range(3)]
    pids = [s.process.pid for s in sessions] + [box.zygote.process.pid]
    assert all(alive(p) for p in pids)
    box.close()
    assert wait_until(lambda: not any(alive(p) for p in pids))
    for s in sessions:
        s.close()


@pytest.fixture
def altered(tmp_path, monkeypatch):
    """-> function that has the zygote run with `confine.py` changed: text → text."""
    def alter(**changes):
        for name in ("sandbox_child.py", "confine.py"):
            shutil.copy(sandbox_link.CHILD.with_name(name), tmp_path)
        path = tmp_path / "confine.py"
        for _, (old, new) in changes.items():
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new))
        monkeypatch.setattr(sandbox_link, "CHILD", tmp_path / "sandbox_child.py")
    return alter


NO_SECCOMP = ('"seccomp": seccomp,', '"seccomp": False,')
NO_LANDLOCK = ('"landlock": max(0,', '"landlock": 0 * max(0,')
NO_NAMESPACES = ("_libc.unshare(sum(UNSHARE.values())) == 0", "False")


@linux
def test_without_seccomp_sessions_do_not_start_unless_weak(altered):
    altered(seccomp=NO_SECCOMP, landlock=NO_LANDLOCK, namespaces=NO_NAMESPACES)
    with pytest.raises(RuntimeError, match="cannot filter system calls"):
        Sandbox().session(SPECS)
    box = Sandbox(weak=True)
    s = box.session(SPECS)
    assert box.layers["seccomp"] is False
    assert s.run("import os\nos.mkdir('folder')\nprint(open('/dev/null').read() == '')", reply).stdout == "True\n"
    block = s.run("while True: pass", reply, cpu_seconds=0.2)
    assert block.error == "TimeoutError" and block.lost
    s.close()
    assert not Path(s.scratch).exists()
    box.close()


@linux
@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6])
def test_older_landlock(altered, abi):
    """Each version knows other rights; what a session may do with files is the same."""
    altered(landlock=('"landlock": max(0,', f'"landlock": min({abi},'))
    box = Sandbox()
    s = box.session(SPECS)
    assert box.layers["landlock"] == min(abi, confine.layers()["landlock"])
    code = "import os\nopen('a', 'w').write('old')\nopen('a', 'w').write('new')\nos.rename('a', 'b')\nprint(open('b').read(), open(np.__file__).read(1))"
    assert s.run(code, reply).stdout == 'new "\n'
    for line in ("open('/etc/passwd')", "open(np.__file__, 'a')", "os.mkdir('x')", "os.rename('b', '/tmp/b')", "os.listdir('/')"):
        assert s.run(line, reply).error == "PermissionError", line
    s.close()
    box.close()


@linux
def test_without_landlock_no_file_opens(altered):
    altered(landlock=NO_LANDLOCK)
    box = Sandbox()
    s = box.session(SPECS)
    for path in ("/etc/passwd", "own", os.__file__):
        assert s.run(f"open({path!r}, 'a')", reply).error == "PermissionError"
    assert s.run("print(get_pose('scalar'), np.random.default_rng().random() < 1)", reply).stdout == "0.5 True\n"
    box.close()
    s.close()


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="root is needed to stop being root")
def test_root_without_namespaces_is_nobody(altered):
    altered(namespaces=NO_NAMESPACES)
    box = Sandbox()
    s = box.session(SPECS)
    assert s.run("import os\nprint(os.getuid(), os.getgid())\nopen('a', 'w').write('x')", reply).stdout == f"{confine.NOBODY} {confine.NOBODY}\n"
    s.close()
    assert not Path(s.scratch).exists() and box.layers["namespaces"] is False
    box.close()


@linux
def test_a_filter_that_does_not_filter_is_an_error(altered):
    altered(filter=("_try(_prctl(22, 2, program)", "_try(_prctl(39)"))       # PR_GET_NO_NEW_PRIVS: succeeds and does nothing
    box = Sandbox()
    s = box.session(SPECS)
    with pytest.raises(RuntimeError, match="the filter of system calls does not act"):
        s.run("x = 1", reply)
    s.close()
    box.close()


# ---------------------------------------------------------------------------------------------- frames and filter

@pytest.mark.parametrize("text", [
    "", "1", "[]", "{}", "nul", '{"call": "x", "args": [], "kwargs": {}}', '{"call": "f", "args": {}, "kwargs": {}}', '{"call": "f", "args": []}',
    '{"call": ["f"], "args": [], "kwargs": {}}', '{"call": "f", "args": [], "kwargs": {}, "more": 1}', '{"ready": true, "done": 1}',
    '{"done": 1, "error": 5, "trace": "", "left": [0, 0]}', '{"done": 1, "error": null, "trace": "", "left": [0]}',
    '{"done": 1, "error": null, "trace": "", "left": [0, -1]}', '{"done": 1, "error": null, "trace": "", "left": [0, true]}',
    '{"call": "f", "args": ["\\ud800"], "kwargs": {}}', '{"call": "f", "args": [], "kwargs": {"\\ud800": 1}}', b"\xff\xfe",
    '{"call": "f", "args": ' + "[" * 50 + "]" * 50 + ', "kwargs": {}}', '{"call": "f", "args": [' + "9" * 500 + '], "kwargs": {}}'])
def test_frames_that_are_none(text):
    with pytest.raises(ValueError):
        sandbox_link.decode(text if isinstance(text, bytes) else text.encode(), {"f"})


def test_a_cut_says_how_much_is_missing():
    assert sandbox._cut("abc", 3, 0) == "abc" and sandbox._cut("abcd", 3, 0) == "abc\n[... 1 more characters left out ...]\n"
    assert sandbox._cut("abc", 3, 7) == "abc\n[... 7 more characters left out ...]\n"
    assert sandbox._cut("abc", 3, None) == "abc\n[... more left out ...]\n" and sandbox._cut("ab", 3, None) == "ab"


def run_filter(program, machine, number, args=()):
    """What a kernel does with classic BPF of the few kinds that we use -> the value that the filter returns."""
    arch = confine.MACHINES[machine][1]
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    at = accumulator = 0
    while True:
        code, yes, no, k = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == confine.LOAD:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code == confine.AND:
            accumulator &= k
        elif code == confine.RETURN:
            return k
        else:
            at += yes if (accumulator == k if code == confine.EQUAL else accumulator >= k) else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter(machine):
    """Both machines' filters, interpreted: the one that this machine is not cannot be tried in its kernel."""
    column = confine.MACHINES[machine][0]
    number = {n: v[column] for n, v in (confine.ALWAYS | confine.PATHS | confine.LOOKS | confine.CHECKED).items()}
    passes = lambda name, *args, files=True: run_filter(confine.filter_program(machine, 77, files), machine, number[name], args) == confine.ALLOW
    assert passes("read") and passes("futex") and passes("exit_group") and passes("openat") and not passes("openat", files=False)
    assert passes("mmap", 0, 1, 3) and not passes("mmap", 0, 1, 4) and not passes("mmap", 0, 1, 7) and not passes("mprotect", 0, 1, 5)
    assert passes("clone", 0x3D0F00) and not passes("clone", 0x11) and not passes("clone", 0x3D0F00 | 0x10000000) and not passes("clone", 0x4111)
    assert passes("fcntl", 3, 3) and passes("fcntl", 3, 1030) and not passes("fcntl", 3, 8) and not passes("fcntl", 3, 10)
    assert passes("ioctl", 3, 0x5451) and not passes("ioctl", 3, 0x5421) and not passes("ioctl", 3, 0x8901)
    assert passes("tgkill", 77, 78, 6) and not passes("tgkill", 76, 76, 9)
    assert passes("prlimit64", 0, 7, 0, 1) and not passes("prlimit64", 0, 7, 1, 0) and not passes("prlimit64", 5, 7, 0, 1) \
        and not passes("prlimit64", 0, 7, 1 << 32, 0)
    allowed = {v for n, v in number.items() if v is not None}
    program = confine.filter_program(machine, 77, True)
    for n in set(range(600)) - allowed:
        assert run_filter(program, machine, n) == (confine.ERRNO | (38 if n == confine.CLONE3[column] else 1)), n
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert run_filter(program, other, 0) == confine.KILL
    assert machine != "x86_64" or run_filter(program, machine, 0x40000000) == confine.ERRNO | 1
