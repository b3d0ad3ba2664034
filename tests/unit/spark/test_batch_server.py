"""The batch server and its callers as real processes; only the batch's command is replaced, by code of the test."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.living_process import is_alive

from headrace.spark.attempts.batch_server import LENGTH, NOT_FORKED, STATUS, is_own_folder, socket_path

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the server needs pidfd_open")

MICRO_BATCH = Path(__file__).parents[3] / "spark_jobs" / "micro_batch.py"

# In place of headrace.spark.attempts.batch_command: it runs what the caller's variable RUN says.
COMMAND = """
import os, sys, threading, time

def main(arguments=None):
    names = {"arguments": arguments, "os": os, "sys": sys, "threading": threading, "time": time}
    exec(os.environ["RUN"], names)
    return names.get("code", 0)
"""
SERVER = """
import os, sys
import command
sys.modules["headrace.spark.attempts.batch_command"] = command
from headrace.spark.attempts import batch_server

batch_server._import_for_batches = lambda: exec(os.environ.get("AT_IMPORT", ""))
batch_server._TERMINATION_SECONDS = float(os.environ.get("TERMINATION_SECONDS", "600"))
exec(os.environ.get("AT_START", ""))
batch_server.main(sys.argv[1:])
"""
# The kernel refuses a system call to the process that calls this, as a container's seccomp profile makes it do.
REFUSAL = """
import ctypes, os, struct

def refuse(call, error, unless_flags=0):
    load, equals, has, end = 0x20, 0x15, 0x45, 0x06
    deny, allow = 0x00050000 | error, 0x7FFF0000
    # The call's number, and the lower half of its first argument.
    code = [(load, 0, 0, 0), (equals, 0, 3, call), (load, 0, 0, 16), (has, 1, 0, unless_flags)]
    code += [(end, 0, 0, deny), (end, 0, 0, allow)]
    text = b"".join(struct.pack("HBBI", *each) for each in code)
    kept = ctypes.create_string_buffer(text, len(text))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(kept)))
    library = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filtered = 38, 22, 2
    if library.prctl(no_new_privileges, 1, 0, 0, 0) or library.prctl(set_seccomp, filtered, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")

def refuse_pidfd_open():
    refuse(434, 1)

def refuse_fork():
    # clone without CLONE_VM, which threads have.
    refuse({"x86_64": 56, "aarch64": 220}[os.uname().machine], 11, unless_flags=0x100)
"""
ITSELF = """
import os, runpy, sys
import command
exec(os.environ.get("AS_CALLER", ""))
sys.modules["headrace.spark.attempts.batch_command"] = command

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STARTED = "open(arguments[-1], 'w').write(str(os.getpid()))\n"


def until(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.02)
    return result


class Place:
    """A folder for temporary files, in which servers and callers find each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (
            ("command", COMMAND),
            ("server", SERVER),
            ("itself", ITSELF),
            ("refusal", REFUSAL),
        ):
            (folder / f"{name}.py").write_text(text)
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(folder)}
        path = socket_path("ledger", "clicks").relative_to(socket_path("", "").parents[1])
        self.socket = folder / path

    def server(self, **env: str) -> subprocess.Popen[str]:
        before = self.socket.stat().st_ino if self.socket.exists() else 0
        process = self._start("server.py", str(os.getpid()), "ledger", "clicks", **env)
        until("server", lambda: self.socket.exists() and self.socket.stat().st_ino != before)
        return process

    def caller(self, run: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """A batch's process as a task starts it, whose command is ``run``."""
        given = ("--ledger", "ledger", "--stream", "clicks", "--batch-time", "1700000000000", *arguments)
        return self._start("itself.py", str(MICRO_BATCH), *given, RUN=run, **env)

    def waiting(self, *, code: str = "time.sleep(600)") -> tuple[subprocess.Popen[str], psutil.Process]:
        """A caller, and the process of its batch, which waits."""
        mark = self.folder / f"mark-{len(self.started)}"
        caller = self.caller(STARTED + code, str(mark))
        pid = until("batch", lambda: mark.exists() and mark.read_text())
        return caller, psutil.Process(int(pid))

    def _start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        # As a receiver job's, which goes into a file.
        log = (self.folder / "server.log").open("a") if script == "server.py" else None
        process = subprocess.Popen(
            [sys.executable, str(self.folder / script), *arguments],
            env={**self.env, **env},
            stdin=subprocess.PIPE,
            stdout=log or subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if log is not None:
            log.close()
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def place() -> Iterator[Place]:
    # Not pytest's folder: the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        yield place
        place.close()


def test_a_batch_has_what_its_caller_has(place: Place) -> None:
    server = place.server()
    told = (
        "import psutil\n"
        "print(os.getppid(), sys.argv[-1], arguments[-1], os.environ['MINE'], os.getcwd())\n"
        "print(os.path.abspath('added') in sys.path)\n"
        "print(psutil.Process().cmdline()[0], len(os.listdir('/proc/self/fd')) - 1, threading.active_count())\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "code = 7"
    )
    caller = place.caller(told, "the last", MINE="mine", PYTHONPATH=f"{place.folder}{os.pathsep}added")
    out, err = caller.communicate("put in", timeout=60)
    given, path, process = out.splitlines()
    assert given == f"{server.pid} the last the last mine {Path.cwd()}"
    assert path == "True"
    # Its three streams, and the watch of the server beside its main thread.
    assert process == "headrace batch clicks 1700000000000 3 2"
    assert (err, caller.returncode) == ("put in\n", 7)


def test_a_batch_has_its_callers_time_zone_umask_and_limits(place: Place) -> None:
    of_server = (
        "import locale, os, resource, signal, time; os.umask(0o022); os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); locale.setlocale(locale.LC_CTYPE, 'C')"
    )
    server = place.server(AT_IMPORT=of_server)
    told = (
        "import locale, resource, signal\n"
        "soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(os.getppid(), time.localtime(0).tm_hour, oct(os.umask(0)), soft)\n"
        "print(locale.setlocale(locale.LC_CTYPE), sys.stdout.encoding, signal.getsignal(signal.SIGHUP).name)"
    )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1
    restrict = f"import os, resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({limit}, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    caller = place.caller(
        told,
        TZ="America/New_York",
        PYTHONIOENCODING="latin-1",
        LC_ALL="C.UTF-8",
        AS_CALLER=f"{restrict}; os.umask(0o027)",
    )
    out, err = caller.communicate(timeout=60)
    # Ignored, if the tests run by nohup.
    hangup = signal.Handlers(signal.getsignal(signal.SIGHUP)).name
    assert out.splitlines() == [f"{server.pid} 19 0o27 {limit}", f"C.UTF-8 iso8859-1 {hangup}"], err


def test_a_caller_of_another_priority_runs_its_batch_itself(place: Place) -> None:
    server = place.server()
    out, err = place.caller("print(os.getppid())", AS_CALLER="import os; os.nice(1)").communicate(timeout=60)
    assert out == f"{os.getpid()}\n", err
    server.terminate()
    _, err = server.communicate(timeout=60)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert f"its caller has nice {nice + 1}, not {nice}; let both run with the same" in err


@pytest.mark.parametrize(
    ("run", "code", "told"),
    [
        ("raise SystemExit(2)", 2, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_caller_ends_as_its_batch_ends(place: Place, run: str, code: int, told: str) -> None:
    server = place.server()
    for _ in range(2):
        caller = place.caller(run)
        _, err = caller.communicate(timeout=60)
        assert (caller.returncode, told in err) == (code, True)
    assert server.poll() is None
    assert place.socket.exists()


def test_batches_run_side_by_side(place: Place) -> None:
    place.server()
    (first, one), (second, other) = place.waiting(), place.waiting()
    assert one.pid != other.pid
    one.kill()
    assert first.wait(60) == -signal.SIGKILL
    assert is_alive(other)
    other.kill()
    assert second.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_caller_reaches_the_batch(place: Place, number: signal.Signals) -> None:
    place.server()
    handled = f"import signal; signal.signal({number}, lambda *_: os._exit(99))\n"
    mark = place.folder / "mark"
    caller = place.caller(handled + STARTED + "time.sleep(600)", str(mark))
    until("batch", mark.exists)
    caller.send_signal(number)
    assert caller.wait(60) == 99


def test_a_batch_is_terminated_if_its_caller_is_killed(place: Place) -> None:
    place.server()
    caller, batch = place.waiting()
    caller.kill()
    until("end of the batch", lambda: not is_alive(batch))


def test_a_batch_that_outlives_sigterm_is_killed_with_its_caller(place: Place) -> None:
    place.server()
    got, mark = place.folder / "signal", place.folder / "mark"
    handled = f"import signal; signal.signal(15, lambda *_: open({str(got)!r}, 'w').close())\n"
    caller = place.caller(handled + STARTED + "time.sleep(600)", str(mark))
    batch = psutil.Process(int(until("batch", lambda: mark.exists() and mark.read_text())))
    caller.terminate()
    until("signal", got.exists)
    assert is_alive(batch)
    caller.kill()
    until("end of the batch", lambda: not is_alive(batch))


IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN)\n"


def test_a_batch_that_ignores_sigterm_is_killed_some_time_after(place: Place) -> None:
    """It is killed some time after its caller was."""
    server = place.server(TERMINATION_SECONDS="1")
    mark = place.folder / "mark"
    caller = place.caller(IGNORES_SIGTERM + STARTED + "time.sleep(600)", str(mark))
    batch = psutil.Process(int(until("batch", lambda: mark.exists() and mark.read_text())))
    other = place.waiting()[1]
    caller.kill()
    killed = time.monotonic()
    until("end of the batch", lambda: not is_alive(batch))
    assert time.monotonic() - killed >= 1
    assert is_alive(other)
    server.terminate()
    _, err = server.communicate(timeout=60)
    assert f"process {batch.pid} of a batch did not end after SIGTERM, and is killed" in err


def test_a_batch_that_ends_on_sigterm_is_not_waited_for(place: Place) -> None:
    server = place.server(TERMINATION_SECONDS="1")
    caller, batch = place.waiting()
    caller.kill()
    until("end of the batch", lambda: not is_alive(batch))
    # The server goes on past the deadline.
    _, other = place.waiting(code="time.sleep(2)")
    until("end of the other batch", lambda: not is_alive(other))
    server.terminate()
    _, err = server.communicate(timeout=60)
    assert server.returncode == 128 + signal.SIGTERM
    assert "did not end" not in err and "Traceback" not in err


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the number of clone is not known")
@pytest.mark.parametrize("refused", ["refuse_fork", "refuse_pidfd_open"])
def test_a_batch_whose_process_is_refused_is_run_by_its_caller(place: Place, refused: str) -> None:
    """The system refuses the process."""
    server = place.server(AT_IMPORT=f"import refusal; refusal.{refused}()")
    for _ in range(2):
        caller = place.caller("print(os.getppid())\ncode = 7")
        out, err = caller.communicate(timeout=60)
        assert (out, caller.returncode) == (f"{os.getpid()}\n", 7), err
    assert server.poll() is None
    assert psutil.Process(server.pid).children() == []
    server.terminate()
    _, err = server.communicate(timeout=60)
    assert err.count("a batch's process was not forked") == 2


def test_a_signal_that_comes_before_the_refusal_is_not_lost(place: Place) -> None:
    server = place.server(AT_IMPORT="import refusal; refusal.refuse_fork()")
    server.send_signal(signal.SIGSTOP)
    until("stopped server", lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
    caller = place.caller("time.sleep(600)")
    # It has the handlers that pass signals on once it waits for the answer.
    until("handlers", lambda: handles(caller.pid, signal.SIGTERM))
    caller.terminate()
    server.send_signal(signal.SIGCONT)
    assert caller.wait(60) == -signal.SIGTERM


def handles(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


def test_a_server_that_may_not_wait_for_processes_ends(place: Place) -> None:
    """The batches run by themselves then."""
    refused = place._start(
        "server.py", str(os.getpid()), "ledger", "clicks", AT_START="import refusal; refusal.refuse_pidfd_open()"
    )
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "each batch's process imports for itself" in err
    assert not place.socket.exists()
    assert place.caller("print(os.getppid())").communicate(timeout=60)[0] == f"{os.getpid()}\n"


def test_the_end_of_a_batch_and_its_caller_ends_no_other_batch(place: Place) -> None:
    """Both end at once."""
    server = place.server()
    (first, one), (second, other) = place.waiting(), place.waiting()
    # The server gets both events together.
    server.send_signal(signal.SIGSTOP)
    until("stopped server", lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
    one.kill()
    until("end of the batch", lambda: not is_alive(one))
    first.kill()
    first.wait(60)
    server.send_signal(signal.SIGCONT)
    until("answer", lambda: not one.is_running())
    out, _ = place.caller("print(os.getppid())").communicate(timeout=60)
    assert int(out) == server.pid
    assert is_alive(other)
    assert second.poll() is None


def test_a_batch_ends_with_the_server_and_its_caller_is_told(place: Place) -> None:
    server = place.server()
    caller, batch = place.waiting()
    server.kill()
    _, err = caller.communicate(timeout=60)
    assert caller.returncode == 1
    assert "the receiver job that the batch ran in has ended" in err
    until("end of the batch", lambda: not is_alive(batch))
    # The killed server has left its socket.
    caller = place.caller("print(os.getppid())")
    assert caller.communicate(timeout=60)[0] == f"{os.getpid()}\n"


def test_the_server_ends_with_the_process_that_started_it(place: Place) -> None:
    command = [sys.executable, str(place.folder / "server.py")]
    starts = f"import os, subprocess; subprocess.run([*{command}, str(os.getpid()), 'ledger', 'clicks'])"
    parent = subprocess.Popen([sys.executable, "-c", starts], env=place.env)
    until("server", place.socket.exists)
    (server,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    until("end of the server", lambda: not is_alive(server))
    assert not place.socket.exists()


def test_a_later_server_takes_over_and_keeps_its_socket(place: Place) -> None:
    first, second = place.server(), place.server()
    first.terminate()
    assert first.wait(60) == 128 + signal.SIGTERM
    out, _ = place.caller("print(os.getppid())").communicate(timeout=60)
    assert int(out) == second.pid
    second.terminate()
    second.wait(60)
    assert not place.socket.exists()


@pytest.mark.parametrize(
    ("arguments", "env"), [(["--way", "classic"], {}), (["--stream", "other"], {}), ([], {"PYSPARK_GATEWAY_PORT": "1"})]
)
def test_a_process_that_is_not_the_servers_runs_its_batch_itself(
    place: Place, arguments: list[str], env: dict[str, str]
) -> None:
    place.server()
    out, err = place.caller("print(os.getppid())", *arguments, **env).communicate(timeout=60)
    assert out == f"{os.getpid()}\n", err


def test_a_folder_that_others_can_enter_is_not_used(place: Place) -> None:
    place.socket.parent.mkdir(mode=0o755)
    place.socket.parent.chmod(0o755)
    refused = place._start("server.py", str(os.getpid()), "ledger", "clicks")
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "not a folder of this user alone" in err
    place.socket.parent.chmod(0o700)
    place.server()
    place.socket.parent.chmod(0o755)
    out, _ = place.caller("print(os.getppid())").communicate(timeout=60)
    assert out == f"{os.getpid()}\n"


def test_only_a_folder_of_this_user_alone_is_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch(0o600)
    own = [is_own_folder(tmp_path / name) for name in ("folder", "link", "file", "none")]
    assert own == [True, False, False, False]


def test_what_is_not_a_request_is_passed_over(place: Place) -> None:
    server = place.server()
    for sent in (b"", b"\0\0\0\5abc", b"\0\0\0\2[]", b"\0\0\0\2{}", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(place.socket))
            connection.sendall(sent)
    out, _ = place.caller("print(os.getppid())").communicate(timeout=60)
    assert int(out) == server.pid


def test_the_output_of_a_caller_with_half_a_request_is_closed(place: Place) -> None:
    server = place.server()
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as connection, os.fdopen(reading, "rb") as output:
        connection.connect(str(place.socket))
        socket.send_fds(connection, [LENGTH.pack(100)], [writing] * 3)
        os.close(writing)
        # Until then this blocks.
        assert output.read() == b""
        assert STATUS.unpack(connection.recv(STATUS.size)) == (NOT_FORKED,)
    assert server.poll() is None


def test_the_servers_imports_start_no_thread_a_fork_would_miss() -> None:
    code = (
        "import os, pathlib; from headrace.spark.attempts.batch_server import _import_for_batches\n"
        "_import_for_batches()\n"
        "names = {(task / 'comm').read_text().strip() for task in pathlib.Path('/proc/self/task').iterdir()}\n"
        "print(*names - {pathlib.Path('/proc/self/comm').read_text().strip()})"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.split()) <= {"jemalloc_bg_thd"}
