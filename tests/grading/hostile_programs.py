# ruff: noqa: E501 (programs as they are written)
"""Programs that want to be judged right without being so, or to do harm. The task: `f(x)` returns twice its argument.

FORGERIES try to bend the verdict. ATTACKS define `attack()`, which is true where it got through to something outside;
behind each stands a right `f` that works only then, so that an attack that succeeds is a program judged right. GREEDY
ones use up what they can get. `{...}` are filled in by the test.
"""

FORGERIES = {
    "os_exit": "import os; os._exit(0)",
    "sys_exit": "import sys; sys.exit(0)",
    "sys_exit_in_call": "import sys\ndef f(x): sys.exit(0)",
    "os_exit_in_call": "import os\ndef f(x): os._exit(0)",
    "exit_by_exec": "import os; os.execv('/usr/bin/true', ['true'])",
    "prints_passed": "print('passed'); print('ok'); print(True)\ndef f(x): print('[0, \"ok\", 42]')",
    "writes_answers_to_every_fd": """
import os
for fd in range(64):
    for n in range(4):
        try: os.write(fd, b'[%d, "ok", true]\\n[%d, true, true]\\n["answer", "ok", true]\\n' % (n, n))
        except OSError: pass
def f(x): os._exit(0)""",
    "writes_verdicts_to_every_fd": """
import os
for fd in range(64):
    for token in ('', '*', 'token'):
        try: os.write(fd, ('["verdict", "%s", 0, true, ""]\\n' % token).encode())
        except OSError: pass
def f(x): return None""",
    "json_of_the_canvas": 'print(\'{"passed": true, "pass": 1, "result": "PASS"}\')\nimport os; os._exit(0)',
    "equal_to_everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 42
    def __bool__(self): return True
def f(x): return Any()""",
    "int_equal_to_everything": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Any(7)""",
    "list_equal_to_everything": """
class Any(list):
    def __eq__(self, other): return True
def f(x): return Any()""",
    "str_equal_to_everything": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Any('')""",
    "pretends_to_be_int": """
class Any:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __index__(self): return 1
    __int__ = __index__
def f(x): return Any()""",
    "reflected_comparison": """
class Any(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
def f(x): return Any('nan')""",
    "patched_builtins": """
import builtins
builtins.all = builtins.any = builtins.bool = builtins.isinstance = lambda *a: True
builtins.AssertionError = type('Never', (BaseException,), {{}})
def f(x): return None""",
    "patched_json": """
import json
json.dumps = lambda *a, **k: '[0, "ok", true]'
json.loads = lambda *a, **k: [0, 'ok', True]
def f(x): return None""",
    "patched_runner": """
import sys
main = sys.modules['__main__']
for name in ('encode', '_answer', '_reason', 'calls', 'serve', 'check', 'scripts'):
    setattr(main, name, lambda *a, **k: ['ok', True])
def f(x): return None""",
    "reads_frames": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in list(frame.f_locals.values()) + list(frame.f_globals.values())]
        frame = frame.f_back
    for v in found:
        if isinstance(v, dict):
            for key in ('expected', 'outputs', 'answers', 'tests', 'sources', 'token'):
                if key in v: return v[key][0]
""",
    "searches_the_heap": """
import gc
def f(x):
    for o in gc.get_objects():
        if isinstance(o, (list, tuple)) and {expected!r} in [p for p in o if type(p) is type({expected!r})]:
            if o is not f.__code__.co_consts: return [p for p in o if p == {expected!r}][0]
""".replace("{expected!r}", "wanted").replace("def f(x):", "wanted = '-'.join(['be', 'bebe'])\ndef f(x):"),
    "reads_proc": """
import glob
def f(x):
    text = ''
    for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/self/*') + ['/box/program.py']:
        try: text += open(path, errors='replace').read(100000)
        except OSError: pass
    for wanted in ('bebe'.upper() + 'BEBE', '4246' + '814381166722'):
        if wanted in text: return int(wanted) if wanted.isdigit() else wanted
""",
    "atexit": """
import atexit, os
atexit.register(lambda: [os.write(fd, b'[0, "ok", true]\\n') for fd in (1, 2)])
def f(x): raise SystemExit(0)""",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('ok')\nraise SystemError",
    "trace_function": """
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        if name in ('ok', 'passed', 'error'): frame.f_locals[name] = True
    return trace
sys.settrace(trace)
def f(x): return None""",
    "replaces_the_answer_channel": """
import os
def f(x):
    for fd in range(3, 64):
        try: os.dup2(2, fd)
        except OSError: pass
    os.write(2, b'[0, "ok", true]')""",
    "closes_everything": "import os\nos.closerange(0, 64)\ndef f(x): return x + x",
    "returns_code": "def f(x): return lambda *a: True",
    "returns_nan": "def f(x): return float('nan')",
    "raises_baseexception": "def f(x): raise BaseException('ok')",
    "raises_with_hostile_str": """
class Bad(Exception):
    def __str__(self): raise SystemExit(0)
def f(x): raise Bad""",
    "hostile_iteration": """
class Any(list):
    def __iter__(self): raise SystemExit(0)
    def __len__(self): raise KeyboardInterrupt
class Endless:
    def __iter__(self): return self
    def __next__(self): return 1
def f(x): return Endless() if x else Any([1])""",
    "contains_itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "nested_deeply": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "grows_in_print": "def f(x):\n    a = []\n    for _ in range(50): a = [a, a]\n    return a",
    "answers_deep_json": "import os\ndef f(x):\n    os.write(3, b'[' * 500000 + b'\\n')",
    "huge_integer": "def f(x): return 1 << 50_000_000",
    "null_and_surrogates": "def f(x): return '\\0\\ud800\\uffff' * 10",
    "syntax_error": "def f(x) return 2 * x",
    "null_byte": "def f(x):\n    return 2 * x\0",
    "deep_source": "x = " + "(" * 5000 + "1" + ")" * 5000 + "\ndef f(x): return 2 * x",
    "endless_minus": "x = " + "-" * 60000 + "1\ndef f(x): return 2 * x",
    "source_encoding": "# coding: no-such\nimport no_such_module\ndef f(x): return 2 * x",
}

ATTACKS = {
    "connects_to_host": """
import socket
def attack():
    socket.create_connection(('127.0.0.1', {port}), timeout=0.2)
    return True""",
    "connects_to_abstract_socket": """
import socket
def attack():
    s = socket.socket(socket.AF_UNIX); s.settimeout(0.2); s.connect('\\0{abstract}')
    return True""",
    "sends_datagram": """
import socket
def attack():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('192.0.2.1', 53))
    return True""",
    "has_an_interface": """
import socket
def attack(): return any(name != 'lo' for _, name in socket.if_nameindex())""",
    "reads_the_tests": "def attack(): return bool(open({test_file!r}).read())",
    "lists_the_repository": "import os\ndef attack(): return bool(os.listdir({repository!r}))",
    "reads_installed_packages": """
import glob, sys
def attack(): return bool(glob.glob(sys.prefix + '/lib/*/*-packages/*') + glob.glob('/usr/lib/*/dist-packages/*'))""",
    "reads_host_file": "def attack(): return bool(open({sentinel!r}).read())",
    "reads_passwd": "def attack(): return bool(open('/etc/passwd').read())",
    "reads_shadow": "def attack(): return bool(open('/etc/shadow').read())",
    "reads_environment": "import os\ndef attack(): return {variable!r} in os.environ",
    "reads_parent_environment": """
def attack():
    return any(b'{variable}' in open(f'/proc/{{n}}/environ', 'rb').read() for n in (1, {pid}))""",
    "writes_host_file": "def attack(): return open({sentinel!r}, 'w').write('x')",
    "escapes_by_symlink": """
import os
def attack():
    os.symlink({sentinel!r}, '/tmp/link')
    return open('/tmp/link', 'a').write('x')""",
    "escapes_by_dots": "def attack(): return open('/tmp/../../../../..' + {sentinel!r}, 'a').write('x')",
    "escapes_by_proc_root": "def attack(): return open('/proc/1/root' + {sentinel!r}, 'a').write('x')",
    "escapes_by_proc_cwd": """
import os
def attack(): return bool(os.listdir('/proc/1/cwd/../../../..' + {repository!r}))""",
    "hard_link": "import os\ndef attack():\n    os.link('/usr/bin/env', '/tmp/env'); return True",
    "writes_usr": "def attack(): return open('/usr/lib/flowjax-was-here', 'w').write('x')",
    "writes_root": "def attack(): return open('/flowjax-was-here', 'w').write('x')",
    "writes_box": "def attack(): return open('/box/program.py', 'w').write('x')",
    "removes_tree": """
import os, shutil
def attack():
    shutil.rmtree('/usr/share', ignore_errors=True); shutil.rmtree({folder!r}, ignore_errors=True)
    return not os.path.exists('/usr/share')""",
    "kills_host_process": "import os\ndef attack():\n    os.kill({pid}, 9); return True",
    "kills_parent_group": "import os\ndef attack():\n    os.killpg({group}, 9); return True",
    "sees_host_processes": """
import os
def attack(): return any(name.isdigit() and int(name) > 64 for name in os.listdir('/proc'))""",
    "ptrace": """
import ctypes
def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.ptrace(16, {pid}, 0, 0) == 0 or libc.ptrace(0, 0, 0, 0) == 0""",
    "reads_memory_of_others": """
import os
def attack():
    for n in [int(n) for n in os.listdir('/proc') if n.isdigit() and int(n) != os.getpid()]:
        open(f'/proc/{{n}}/mem', 'rb'); return True""",
    "user_namespace": """
import ctypes
def attack(): return ctypes.CDLL(None).unshare(0x10000000) == 0""",
    "clone_namespace": """
import ctypes
def attack():
    pid = ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0: ctypes.CDLL(None)._exit(0)
    return pid > 0""",
    "chroot": "import os\ndef attack():\n    os.chroot('/tmp'); return True",
    "mount": """
import ctypes
def attack(): return ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0""",
    "unmount": "import ctypes\ndef attack(): return ctypes.CDLL(None).umount2(b'/tmp', 2) == 0",
    "becomes_root": "import os\ndef attack():\n    os.setuid(0); return True",
    "setuid_program": """
import subprocess
def attack(): return subprocess.run(['su', '-c', 'true'], capture_output=True, timeout=0.5).returncode == 0""",
    "raises_limits": """
import resource
def attack():
    resource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000)); return True""",
    "raises_priority": "import os\ndef attack(): return os.nice(-5) < 0",
    "lowers_its_priority": "import os\ndef attack(): return os.nice(5) > 0",
    "lowers_its_class": """
import os
def attack():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); return True""",
    "shares_one_processor": """
import os
def attack():
    os.sched_setaffinity(0, os.sched_getaffinity(0)); return True""",
    "makes_device": "import os\ndef attack():\n    os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0)); return True",
    "reads_disk": """
import os
def attack():
    for name in ('sda', 'vda', 'nvme0n1', 'mem', 'kmem', 'kmsg', 'kvm', 'fuse'):
        if os.path.exists('/dev/' + name): return True""",
    "kernel_settings": "def attack(): return open('/proc/sys/kernel/hostname', 'w').write('x')",
    "sets_clock": "import time\ndef attack():\n    time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "sets_hostname": "import socket\ndef attack():\n    socket.sethostname('x'); return True",
    "keyring": "import ctypes\ndef attack(): return ctypes.CDLL(None).syscall(250, 0, -4, 0) >= 0",
    "bpf": "import ctypes\ndef attack(): return ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0",
    "memory_without_limit": """
import os
def attack():
    os.memfd_create('x'); return True""",
    "leaks_inherited_files": """
import os
def attack():
    for fd in range(3, 256):
        try: target = os.readlink(f'/proc/self/fd/{{fd}}')
        except OSError: continue
        if not target.startswith(('pipe:', '/dev/null')): return True""",
}

_LIBC = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == 'aarch64'
"""
KERNEL_ATTACKS = {  # system calls by number: x86-64, then arm64
    "semget": (64, 190, "0, 32000, 0o600"),
    "shmget": (29, 194, "0, 1 << 30, 0o600"),
    "msgget": (68, 186, "0, 0o600"),
    "mq_open": (240, 180, "b'x', 0o102, 0o600, 0"),
    "memfd_create": (319, 279, "b'x', 0"),
    "memfd_secret": (447, 447, "0"),
    "io_uring_setup": (425, 425, "8, ctypes.create_string_buffer(200)"),
    "userfaultfd": (323, 282, "0"),
    "perf_event_open": (298, 241, "ctypes.create_string_buffer(200), 0, -1, -1, 0"),
    "add_key": (248, 217, "b'user', b'x', b'x', 1, -4"),
    "inotify_init": (294, 26, "0"),
    "fanotify_init": (300, 262, "0, 0"),
    "landlock": (444, 444, "0, 0, 1"),
    "seccomp": (317, 277, "0, 0, 0"),
    "personality": (135, 92, "0x0040000"),
    "vmsplice": (278, 75, "0, 0, 0, 0"),
    "mlock": (149, 228, "ctypes.create_string_buffer(4096), 4096"),
    "process_vm_readv": (310, 270, "1, 0, 0, 0, 0, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "kcmp": (312, 272, "1, 1, 0, 0, 0"),
    "name_to_handle_at": (303, 264, "-100, b'/', 0, 0, 0"),
    "open_tree": (428, 428, "-100, b'/', 1"),
    "swapon": (167, 224, "b'/tmp/x', 0"),
    "reboot": (169, 142, "0, 0, 0, 0"),
    "syslog": (103, 116, "10, 0, 0"),
    "vsock": (41, 198, "40, 1, 0"),
    "inet": (41, 198, "2, 1, 0"),
    "inet6": (41, 198, "10, 2, 0"),
    "netlink": (41, 198, "16, 3, 0"),
    "packet": (41, 198, "17, 3, 0"),
    "alg": (41, 198, "38, 5, 0"),
    "bluetooth": (41, 198, "31, 5, 0"),
    "larger_pipe": (72, 25, "__import__('os').pipe()[0], 1031, 1 << 20"),
    "larger_buffer": (
        54,
        208,
        "__import__('socket').socketpair()[0].detach(), 1, 7, ctypes.byref(ctypes.c_int(1 << 20)), 4",
    ),
    "x32": (0x40000000 + 39, -1, "0"),
}
# A call that the filter lets through fails, if at all, with something else than these.
ATTACKS |= {
    f"calls_{name}": f"{_LIBC}\ndef attack():\n    n = {arm} if arm else {x86}\n"
    f"    return libc.syscall(n, {arguments}) >= 0 or ctypes.get_errno() not in (1, 38, 97)"
    for name, (x86, arm, arguments) in KERNEL_ATTACKS.items()
}

GREEDY = {
    "fork_bomb": "import os\nwhile True: os.fork()",
    "fork_bomb_in_call": "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "shell_fork_bomb": "import os\nos.system('b() { b | b & }; b')\nwhile True: pass",
    "thread_bomb": """
import threading, time
def spin():
    while True: pass
while True:
    threading.Thread(target=spin, daemon=True).start()""",
    "memory": "x = []\nwhile True: x.append(bytearray(10_000_000))",
    "memory_at_once": "x = bytearray(1 << 40)",
    "memory_mapped": "import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(1000)]\nfor m in x: m[:] = b'x' * len(m)",
    "memory_string": "def f(x): return 'x' * (1 << 36)",
    "disk_one_file": """
with open('/tmp/big', 'wb') as file:
    while True: file.write(b'x' * 1_000_000)""",
    "disk_many_files": """
n = 0
while True:
    n += 1
    open(f'/tmp/{n}', 'wb').write(b'x' * 1_000_000)""",
    "disk_shared_memory": """
n = 0
while True:
    n += 1
    open(f'/dev/shm/{n}', 'wb').write(b'x' * 1_000_000)""",
    "open_files": "x = [open('/dev/null') for _ in range(100000)]",
    "output": "while True: print('x' * 10000)",
    "output_on_stderr": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "output_to_answers": "import os\nwhile True: os.write(3, b'x' * 10000)",
    "long_answer": "def f(x): return 'x' * 30_000_000",
    "loop": "while True: pass",
    "loop_in_call": "def f(x):\n    while True: pass",
    "loop_that_catches": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass""",
    "loop_without_alarm": """
import signal
signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.signal = lambda *a: None
signal.setitimer = lambda *a: None
def f(x):
    while True: pass""",
    "loop_in_c": "def f(x): return pow(3, 10 ** 9, 10 ** 2000 + 1) and 10 ** 10 ** 8",
    "backtracking": "import re\ndef f(x): return re.match('(a+)+$', 'a' * 60 + 'b')",
    "sleep": "import time\ntime.sleep(1000)",
    "stops_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nimport time; time.sleep(1000)",
    "kills_everybody": "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.abort()",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
def f(x): return None""",
    "daemon_holding_pipes": "import os, time\nif os.fork() == 0: time.sleep(1000)\nos._exit(0)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "abort": "import os\nos.abort()",
}

# Against tests that are code, which see the program's objects. Each passes only if a comparison, an exception or the
# end of the program is taken for a verdict, or if something of the tests can be read from where the program is.
TRICKS = {
    "exits_in_call": "import os\ndef f(x): os._exit(0)",
    "exits_by_system_exit": "def f(x): raise SystemExit(0)",
    "killed_in_call": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "aborts_in_call": "import os\ndef f(x): os.abort()",
    "equal_object": "class A:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return A()",
    "unequal_and_equal": "class A:\n    __eq__ = __ne__ = __lt__ = __gt__ = lambda s, o: True\ndef f(x): return A()",
    "class_that_is_f": "class f:\n    def __init__(s, x): pass\n    def __eq__(s, o): return True",
    "int_class_that_is_f": "class f(int):\n    def __new__(c, x): return int.__new__(c, 0)\n    def __eq__(s, o): return True",
    "str_that_equals": "class A(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(x): return A()",
    "list_that_equals": "class A(list):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "dict_that_equals": "class A(dict):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "tuple_that_equals": "class A(tuple):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "mixed_base_that_equals": """
class B:
    def __eq__(s, o): return True
    __hash__ = None
class A(B, int): pass
def f(x): return A(3)""",
    "meta_class_that_equals": """
class M(type):
    def __eq__(c, o): return True
    def __instancecheck__(c, o): return True
    __hash__ = type.__hash__
class A(metaclass=M): pass
def f(x): return A""",
    "enum_that_equals": """
import enum
class E(enum.Enum):
    A = 1
    def __eq__(s, o): return True
    __hash__ = None
def f(x): return E.A""",
    "decimal_that_equals": """
from decimal import Decimal
class A(Decimal):
    def __eq__(s, o): return True
def f(x): return A(1)""",
    "subtracts_to_nothing": """
class A:
    def __sub__(s, o): return 0
    __rsub__ = __add__ = __radd__ = __mod__ = __sub__
    def __abs__(s): return 0
def f(x): return A()""",
    "contains_everything": "class A:\n    def __contains__(s, o): return True\n    __eq__ = __contains__\ndef f(x): return A()",
    "claims_a_class": "class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "answers_true_to_all": """
class A:
    def __getattr__(s, n): return lambda *a, **k: True
    __eq__ = lambda s, o: True
    __bool__ = lambda s: True
def f(x): return A()""",
    "raises_assertion_error": "def f(x): raise AssertionError('passed')",
    "raises_what_tests_raise": "def f(x):\n    import unittest\n    raise unittest.SkipTest('fine')",
    "raises_stop": "def f(x): raise StopIteration",
    "raises_generator_exit": "def f(x): raise GeneratorExit",
    "raises_keyboard_interrupt": "def f(x): raise KeyboardInterrupt",
    "raises_gone": "class Gone(BaseException): pass\ndef f(x): raise Gone",
    "raises_late": "import sys\ndef f(x): raise sys.modules['__main__']._Late",
    "raises_equal": "class E(Exception):\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "returns_itself": "def f(x): return f",
    "returns_a_mirror": "class A: pass\na = A(); a.a = a\ndef f(x): return a",
    "returns_a_module": "import unittest\ndef f(x): return unittest",
    "returns_exec": "def f(x): return exec",
    "returns_exit": "import os\ndef f(x): return os._exit",
    "patches_equality": "import operator\noperator.eq = lambda a, b: True\ndef f(x): return operator.eq",
    "patches_unittest": """
import unittest, sys
unittest.TestCase.assertEqual = lambda *a: None
unittest.TestCase.run = lambda *a: None
unittest.TextTestRunner.run = lambda *a: None
def f(x): return None""",
    "patches_mock": "from unittest import mock\nmock.Mock.assert_called_once = lambda *a: True\ndef f(x): return None",
    "patches_its_runner": """
import sys
objects = None
def f(x):
    peer = [v for v in sys._getframe(2).f_locals.values() if hasattr(v, 'ask')]
    for p in peer:
        for name in ('set', 'import', 'patch', 'name'):
            try: p.ask(name, 'builtins', [], 'AssertionError', Exception)
            except Exception: pass
    return None""",
    "asks_the_tests_for_more": """
import sys
def peer_of():
    frame = sys._getframe()
    while frame:
        for v in frame.f_locals.values():
            if hasattr(v, '_kept') and hasattr(v, 'ask'): return v
        frame = frame.f_back
def f(x):
    peer = peer_of()
    for number in range(0, 60, 2):
        for name in ('__globals__', '__code__', '__self__', '__dict__', 'f_globals', '__func__', '__closure__'):
            try:
                found = peer.ask('get', number, name)
                if found: return x + x
            except BaseException: pass
""",
    "reads_the_heap": """
import gc
def f(x):
    wanted = type(x)
    for o in gc.get_objects():
        if isinstance(o, dict) and any(k in o for k in ('expected', 'sources', 'token')): return x + x if o.get('sources') else None
""",
    "reads_frames_above": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        wanted = ''.join(['BEBE', 'BEBE'])
        if wanted in repr(frame.f_code.co_consts) + repr(frame.f_globals.keys()) or 'assert' in repr(frame.f_globals.get('sources')): return x + x
        frame = frame.f_back
""",
    "reads_other_processes": """
import glob
def f(x):
    for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ') + glob.glob('/tmp/*'):
        try:
            if b'assert' in open(path, 'rb').read(): return x + x
        except OSError: pass
""",
    "reads_the_callback": "def f(x):\n    return x + x if hasattr(x, '__globals__') or hasattr(x, '__code__') else None",
    "writes_a_verdict": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'["verdict", "", 0, true, ""]\\n["verdict", null, 0, true, ""]\\n')
        except OSError: pass
""",
    "writes_an_answer_ahead": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'peer ["return", true, {}, []]\\n' * 50)
        except OSError: pass
""",
    "answers_nonsense": """
import os
def f(x):
    for fd in range(3, 20):
        for text in (b'peer []', b'peer {}', b'peer ["return"]', b'peer nothing', b'peer ["do", "import", ["list", 1, "this"], {}]'):
            try: os.write(fd, text + b'\\n')
            except OSError: pass
""",
    "asks_for_an_import": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'peer ["do", "_do_import", ["list", 101, "antigravity"], {}]\\n')
        except OSError: pass
""",
    "sends_a_hostile_name": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'peer ["return", ["named", "os", "_exit"], {}, []]\\npeer ["return", ["pure", "builtins", "exec"], {}, []]\\n')
        except OSError: pass
""",
    "sends_a_deep_answer": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'peer ' + b'[' * 100000 + b'\\n')
        except OSError: pass
""",
    "sends_a_huge_number": "def f(x): return 1 << 30_000_000",
    "sends_files_elsewhere": """
import os
def f(x):
    for fd in range(3, 20):
        try: os.write(fd, b'peer ["return", null, {"files": [["../box/program.py", "00", 1], ["/etc/x", "00", 1]]}, []]\\n')
        except OSError: pass
""",
    "changes_shared_data_later": """
import threading
kept = []
def f(x):
    kept.append(x)
    if isinstance(x, list): x.clear()
    return None""",
    "endless_generator": "def f(x):\n    while True: yield x + x",
    "lazy_answer": "def f(x): return (y for y in [x + x])",
    "thread_that_writes": """
import threading, os, time
def spam():
    while True:
        try: os.write(3, b'peer ["return", true, {}, []]\\n')
        except OSError: pass
        time.sleep(0.01)
threading.Thread(target=spam, daemon=True).start()
def f(x): return None""",
    "fork_that_answers": "import os\ndef f(x):\n    os.fork()\n    return None",
    "redefines_names_of_tests": "assertEqual = candidate = check = AssertionError = lambda *a, **k: True\ndef f(x): return None",
    "names_that_shadow": "range = isinstance = len = sorted = lambda *a, **k: []\nException = BaseException\ndef f(x): return None",
    "async_answer": "async def f(x): return x + x",
    "property_on_module": """
import sys, types
class M(types.ModuleType):
    def __getattr__(s, n): return True
sys.modules['solution'] = M('solution')
def f(x): return None""",
    "callable_instance": """
class F:
    def __call__(s, x): return s
    def __eq__(s, o): return True
f = F()""",
    "hash_collision": "class A:\n    def __hash__(s): return hash(42)\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "sleeps_in_bits": "import time\ndef f(x):\n    while True: time.sleep(0.01)",
    "burns_in_children": "import os\ndef f(x):\n    while True:\n        if os.fork() == 0:\n            for _ in range(10**6): pass\n            os._exit(0)",
}
