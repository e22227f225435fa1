"""Workers do as they are told, and whatever ends one of them is told by the chief."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import crew_helpers
import pytest
from crew_helpers import Toy, Unreadable, fails_to_build
from torch.distributed import TCPStore

from sentinel_bench import errors
from sentinel_bench.errors import (
    ConfigError,
    KnowledgeError,
    PluginError,
    RunError,
    SentinelBenchError,
)
from sentinel_bench.pipeline import chief, crew
from sentinel_bench.pipeline.crew import LocalCrew
from sentinel_bench.pipeline.torchrun import under_torchrun
from sentinel_bench.pipeline.worker import Failure
from sentinel_bench.runner import party_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SIZE = 3
NAMES = ["rank 0 (stage 0)", "rank 1 (stage 1)", "rank 2 (stage 2)"]
RANKS = pytest.mark.parametrize("rank", range(SIZE))
SCRIPT = Path(crew_helpers.__file__)
Start = Callable[..., LocalCrew]


@pytest.fixture(scope="module", autouse=True)
def _pytest_is_imported_once() -> None:
    """Every worker imports the script that was started, which is pytest here."""
    if "pytest" not in crew.PRELOAD:
        crew.PRELOAD.append("pytest")


@pytest.fixture(scope="module")
def healthy() -> Iterator[LocalCrew]:
    with LocalCrew(SIZE, Toy, timeout=30) as workers:
        yield workers


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a crew; nothing of it may be left afterwards."""
    crews = []

    def begin(build: Any = Toy, timeout: float = 30.0) -> LocalCrew:
        workers = LocalCrew(SIZE, build, timeout=timeout, describe=lambda rank: f"stage {rank}")
        crews.append(workers)
        return workers

    yield begin
    for workers in crews:
        workers.close()
        assert_gone(workers)


def assert_gone(workers: LocalCrew) -> None:
    assert [p.is_alive() for p in workers._processes] == [False] * SIZE
    assert not any(Path(f"/proc/{p.pid}").exists() for p in workers._processes)


def failure_of(workers: LocalCrew, method: str, *args: Any) -> SentinelBenchError:
    """Return what a call raises; no worker is left, and no other call is possible."""
    with pytest.raises(SentinelBenchError) as caught:
        workers.call(method, *args)
    assert_gone(workers)
    with pytest.raises(RunError, match="the workers have ended: "):
        workers.call("total", 1)
    return caught.value


def test_a_call_runs_in_all_workers_and_returns_the_value_of_rank_0(healthy: LocalCrew) -> None:
    assert healthy.call("total", 1.5) == 1.5 * 3 + 0 + 1 + 2
    assert healthy.call("total", 2) == 9


def test_only_rank_0_is_heard_and_in_order(healthy: LocalCrew) -> None:
    heard: list[Any] = []
    here = threading.get_ident()

    def listen(kind: str, fields: dict[str, Any]) -> None:
        assert threading.get_ident() == here
        heard.append((kind, fields))

    assert healthy.call("tells", 20, listen=listen) == "told"
    assert heard == [
        ("sum", {"rank": 0, "i": i, "kind": "x", "sum": 3 * i + 3.0}) for i in range(20)
    ]
    assert healthy.call("tells", 2) == "told"  # nobody listens


def test_messages_may_be_larger_than_a_pipe(healthy: LocalCrew) -> None:
    data = random.Random(1).randbytes(5_000_000)
    assert healthy.call("large", data) == data[::-1]


def test_workers_have_the_threads_and_the_environment_of_their_crew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CREW_TEST", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with LocalCrew(2, Toy, timeout=30, threads=2) as workers:
        assert workers.call("settings") == {
            "threads": 2,
            "OMP_NUM_THREADS": "2",
            "CREW_TEST": "here",
        }
    assert os.environ["OMP_NUM_THREADS"] == "1"


@RANKS
def test_an_error_of_a_worker_is_raised_as_it_is_with_its_rank(start: Start, rank: int) -> None:
    error = failure_of(start(), "raises", rank, PluginError("delay: no!", "attack"))
    assert (type(error), str(error)) == (PluginError, f"{NAMES[rank]}: delay: no!")
    assert isinstance(error, PluginError)
    assert error.party == "attack"


@pytest.mark.parametrize(
    ("error", "kind", "party"),
    [
        (KnowledgeError("too much"), KnowledgeError, "attack"),
        (ConfigError("no"), ConfigError, "pipeline"),
        (RunError("no"), RunError, "host"),
        (crew_helpers.PickyError("a", "b"), PluginError, "defense"),
        (OSError(28, "No space left on device"), RunError, "host"),
        (MemoryError(), RunError, "host"),
        (SystemExit(1), RunError, "pipeline"),
        (RuntimeError("CUDA out of memory. Tried 2 GiB"), RunError, "host"),
    ],
)
def test_a_failure_keeps_class_andparty_of(error: BaseException, kind: type, party: str) -> None:
    for raised in (error, wrapped(error)):
        failure = Failure.of(raised)
        assert isinstance(failure.error, kind)
        assert not failure.lost
        assert getattr(failure.error, "party", party_of(failure.error)) == party


@pytest.mark.parametrize("kind", [c for c in vars(errors).values() if isinstance(c, type)])
def test_every_class_of_errors_can_be_made_from_its_message_alone(kind: type[Exception]) -> None:
    if issubclass(kind, SentinelBenchError):
        error = Failure.of(kind("words")).error
        assert (type(error), str(error)) == (kind, "words")


def wrapped(error: BaseException) -> Exception:
    """Raise as the schedule of torch does."""
    try:
        try:
            raise error
        except BaseException as inner:
            raise RuntimeError("stage 2 failed to run forward:\n  args: ...") from inner
    except RuntimeError as outer:
        return outer


def test_what_torch_wraps_is_found_inside(start: Start) -> None:
    cause = PluginError("sentinel: no!", "defense")
    error = failure_of(start(), "raises", 1, RuntimeError("failed to run forward"), cause)
    assert (type(error), str(error)) == (PluginError, f"{NAMES[1]}: sentinel: no!")
    assert isinstance(error, PluginError)
    assert error.party == "defense"


def test_other_errors_tell_type_place_and_message_in_one_line(start: Start) -> None:
    error = failure_of(start(), "raises", 2, ValueError("two\nlines"))
    assert isinstance(error, crew.WorkerError)
    assert error.party == "pipeline"
    line = next(
        i for i, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "raise error from" in text
    )
    assert str(error) == f"{NAMES[2]}: ValueError at crew_helpers.py:{line}: two lines"


def test_an_error_that_cannot_be_pickled_arrives(start: Start) -> None:
    error = failure_of(start(), "raises_picky")
    assert type(error) is PluginError
    assert str(error).endswith(": one two")
    assert error.party == "defense"


def test_a_method_that_is_not_there_is_an_error_that_names_it(start: Start) -> None:
    assert "'Toy' object has no attribute 'totale'" in str(failure_of(start(), "totale"))


@RANKS
def test_the_cause_is_told_though_the_others_lose_it_first(start: Start, rank: int) -> None:
    error = failure_of(start(), "loses", rank, PluginError("gone", "attack"))
    assert (type(error), str(error)) == (PluginError, f"{NAMES[rank]}: gone")


def test_without_a_cause_who_did_not_answer_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chief, "GRACE", 1.0)
    error = failure_of(start(), "loses", 1, None)
    assert "Connection closed by peer" in str(error)
    assert str(error).endswith(f"; no answer from {NAMES[1]}")


@RANKS
def test_a_killed_worker_is_named_with_its_signal(start: Start, rank: int) -> None:
    error = failure_of(start(), "signals", rank, signal.SIGKILL)
    assert str(error).startswith(f"{NAMES[rank]}: the process was killed by SIGKILL")
    assert party_of(error) == "host"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMIN + 3])
def test_other_signals_are_named_too(start: Start, number: int) -> None:
    error = failure_of(start(), "signals", 1, number)
    names = {int(s): s.name for s in signal.Signals}
    assert str(error).endswith(f"was killed by {names.get(number, f'signal {number}')}")


def test_a_worker_that_exits_is_named_with_its_code(start: Start) -> None:
    assert str(failure_of(start(), "exits", 1)) == (
        f"{NAMES[1]}: the process ended with exit code 3"
    )


def test_a_stopped_worker_is_given_up(start: Start) -> None:
    error = failure_of(start(timeout=1.5), "signals", 1, signal.SIGSTOP)
    assert str(error).startswith(f"{NAMES[1]}: no heartbeat for 1.5 s: it is stopped")


def test_a_worker_that_stops_in_half_a_message_is_given_up(start: Start) -> None:
    error = failure_of(start(timeout=1.5), "stops_in_half_a_message")
    assert str(error).startswith(f"{NAMES[0]}: no heartbeat for 1.5 s")


def test_a_stopped_worker_that_does_not_read_its_command_is_given_up(start: Start) -> None:
    workers = start(timeout=1.5)
    os.kill(workers.call("pids")[1], signal.SIGSTOP)
    error = failure_of(workers, "large", bytes(5_000_000))
    assert str(error).startswith(f"{NAMES[1]}: no heartbeat")


@pytest.mark.parametrize(("method", "args"), [("deadlocks", ()), ("sleeps", (2,))])
def test_a_call_without_progress_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, method: str, args: tuple[int, ...]
) -> None:
    monkeypatch.setattr(chief, "GRACE", 0.5)
    error = failure_of(start(timeout=1.5), method, *args)
    assert str(error).startswith(f"no progress for 1.5 s: no answer from {', '.join(NAMES)}")
    assert "--timeout" in str(error)


def test_a_call_that_tells_may_take_longer_than_the_timeout(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chief, "GRACE", 0.1)
    assert start(timeout=1.0).call("tells", 8, 0.2) == "told"


def test_the_time_in_which_the_chief_was_held_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 100.25, 100.75, 500.0, 500.5, 501.0, 501.0])
    monkeypatch.setattr(chief.time, "monotonic", lambda: next(times))
    watch = chief.Stopwatch()
    assert [watch.tick() for _ in range(4)] == [0.25, 0.75, 1.75, 2.25]
    watch.restart()
    assert watch.tick() == 0


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", "the process was killed by SIGKILL"),
        ("exits", "the process ended with exit code 3"),
        ("raises", "no such place"),
    ],
)
def test_a_worker_that_fails_while_building_is_named(start: Start, how: str, text: str) -> None:
    with pytest.raises(SentinelBenchError) as caught:
        start(partial(fails_to_build, rank=1, how=how))
    assert str(caught.value).startswith(f"{NAMES[1]}: {text}")
    assert isinstance(caught.value, PluginError) == (how == "raises")


def test_a_builder_that_workers_cannot_read_is_an_error(start: Start) -> None:
    with pytest.raises(RunError, match=r"ImportError at .*: no module named nonsense"):
        start(Unreadable())
    with pytest.raises(RunError, match="cannot be sent between processes"):
        start(lambda post: post)


def test_what_cannot_be_pickled_is_an_error(start: Start) -> None:
    error = failure_of(start(), "unpicklable")
    assert str(error).startswith(f"{NAMES[0]}: cannot be sent between processes")
    error = failure_of(start(), "large", lambda: None)
    assert str(error).startswith("cannot be sent between processes")


def test_what_the_chief_raises_while_it_listens_ends_the_crew(start: Start) -> None:
    workers = start()

    def listen(kind: str, fields: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        workers.call("sums_for_ever", listen=listen)
    assert_gone(workers)


def test_ctrl_c_ends_the_workers_and_is_raised_on(start: Start) -> None:
    workers = start()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if not timer.ident:
            timer.start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may come ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.call("sums_for_ever", listen=listen)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_gone(workers)


def test_closing_twice_is_fine_and_no_call_follows(start: Start) -> None:
    workers = start()
    folder = Path(workers._kill.peek()[2][1])  # type: ignore[index]
    assert folder.exists()
    workers.close()
    assert [p.exitcode for p in workers._processes] == [0] * SIZE
    assert not folder.exists()
    workers.close()
    with pytest.raises(RunError, match="the workers have ended: the crew was closed"):
        workers.call("total", 1)


def test_closing_does_not_wait_for_a_stopped_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "FAREWELL", 0.5)
    workers = start()
    os.kill(workers.call("pids")[1], signal.SIGSTOP)
    workers.close()
    assert_gone(workers)


def test_a_crew_that_is_forgotten_ends() -> None:
    workers = LocalCrew(SIZE, Toy, timeout=30)
    pids = workers.call("pids")
    del workers
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_random_kills_leave_nothing_and_name_one_that_was_killed(start: Start) -> None:
    draw = random.Random(5)
    for _ in range(10):
        workers = start()
        pids = workers.call("pids")
        victim = draw.randrange(SIZE)
        threading.Timer(draw.uniform(0, 0.1), os.kill, (pids[victim], signal.SIGKILL)).start()
        error = failure_of(workers, "sums_for_ever")
        assert str(error).startswith(f"{NAMES[victim]}: the process was killed by SIGKILL")


def marked(marker: str) -> list[int]:
    """Return the processes that have `marker` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def end_all(marker: str) -> None:
    for pid in marked(marker):
        os.kill(pid, signal.SIGKILL)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_chief_ends_all_workers_even_a_stopped_one(
    tmp_path: Path, number: int
) -> None:
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT.with_name("crew_chief.py")), "2"],
        env=os.environ | {"CREW_TEST": marker, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert {process.pid, worker} < set(marked(marker))
        os.kill(worker, signal.SIGSTOP)
        if number == signal.SIGINT:  # as a terminal does
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        wait_until(lambda: process.poll() is not None and not marked(marker))
    finally:
        end_all(marker)
        _, errors = process.communicate()
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1  # the chief's own
        assert errors.endswith("KeyboardInterrupt\n")
    else:
        assert errors == ""


CALLS = [
    "'told'",
    repr([("sum", {"rank": 0, "i": i, "kind": "x", "sum": 3.0 * i + 3}) for i in (0, 1)]),
]
"""What rank 0 writes down before the call that fails."""


def test_torchrun_names_the_cause_and_rank_0_lives_to_write_it_down(tmp_path: Path) -> None:
    marker, record = uuid.uuid4().hex, tmp_path / "record"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    arguments = [str(SIZE), str(SCRIPT), "raises", "(2, PluginError('no!', 'attack'))", str(record)]
    names = {"CREW_TEST": marker, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *arguments],
            env=os.environ | names,
            capture_output=True,
            text=True,
            timeout=120,
        )
        wait_until(lambda: not marked(marker))
    finally:
        end_all(marker)
    assert record.exists(), done.stderr
    assert record.read_text().splitlines() == [
        *CALLS,
        "PluginError",
        "attack",
        f"{NAMES[2]}: no!",
    ]
    assert done.returncode == 1


def ranks(record: Path, method: str, args: str) -> tuple[list[str], list[int | None]]:
    """Return what rank 0 writes down where nobody supervises the ranks, and their exit codes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=crew_helpers.rank_without_launcher,
            args=(rank, SIZE, store.port, method, args, str(record)),
        )
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        return record.read_text().splitlines(), [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_of_torchrun_end_when_rank_0_closes_the_crew(tmp_path: Path) -> None:
    lines, codes = ranks(tmp_path / "record", "total", "(1,)")
    assert (lines, codes) == ([*CALLS, "6.0"], [0, 0, 0])


def test_a_rank_of_torchrun_that_fails_exits_and_so_do_those_that_wait_for_it(
    tmp_path: Path,
) -> None:
    lines, codes = ranks(tmp_path / "record", "raises", "(2, PluginError('no!', 'attack'))")
    assert (lines[2:], codes) == (["PluginError", "attack", f"{NAMES[2]}: no!"], [0, 1, 1])


def test_a_rank_of_torchrun_that_was_killed_is_one_that_did_not_answer(tmp_path: Path) -> None:
    lines, codes = ranks(tmp_path / "record", "signals", "(1, 9)")
    assert lines[:-1] == [*CALLS, "WorkerError", "host"]
    assert lines[-1].endswith(f"; no answer from {NAMES[1]}")
    assert codes == [0, -9, 1]


def test_rank_0_of_torchrun_gives_itself_up(tmp_path: Path) -> None:
    lines, codes = ranks(tmp_path / "record", "sleeps", "(0,)")
    assert lines[:-1] == [*CALLS, "RunError", "none"]
    assert lines[-1].startswith(f"no progress for 1.5 s: no answer from {', '.join(NAMES)}; ")
    assert codes == [0, 1, 1]


def test_rank_0_of_torchrun_survives_its_end_and_tells_of_it(tmp_path: Path) -> None:
    lines, codes = ranks(tmp_path / "record", "terminated", "()")
    assert codes == [0, 0, 0]
    assert lines[:-1] == [*CALLS, "WorkerError", "host"]
    assert lines[-1].startswith(f"{NAMES[0]}: torchrun ended the run (SIGTERM)")


def test_this_process_is_not_of_torchrun() -> None:
    assert not under_torchrun()
