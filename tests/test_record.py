"""Run folders: what is written can be read again, or the error says where and what to do."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel_bench import record
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.record import RunFolder

CONFIG = {"cell": {"attack": "zero"}, "identity": {"train": {"steps": 3}, "attack": "zero"}}
DEFENDED = {"outcome": "defended"}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def new(root: Path, label: str = "zero-vs-none") -> RunFolder:
    return RunFolder.create(root, label, CONFIG)


def create_many(root: Path) -> list[str]:
    names = []
    for _ in range(50):
        with new(root) as run:
            names.append(run.path.name)
    return names


# Identity.


def test_digest_ignores_the_order_of_keys_and_nothing_else() -> None:
    one = record.digest({"a": 1, "b": {"c": 2, "d": [1, 2]}})
    assert one == record.digest({"b": {"d": (1, 2), "c": 2}, "a": 1})
    assert one != record.digest({"a": 1, "b": {"c": 2, "d": [2, 1]}})
    assert len(one) == 64


@pytest.mark.parametrize("value", [math.nan, math.inf, object()])
def test_digest_refuses_what_json_cannot_hold(value: object) -> None:
    with pytest.raises(ConfigError, match="plain JSON"):
        record.digest({"a": value})


def test_differing_names_the_dotted_keys() -> None:
    a = {"train": {"steps": 1, "lr": 0.1}, "betas": [1, 2], "old": {}}
    b = {"train": {"steps": 2, "lr": 0.1}, "betas": (1, 2), "new": {"x": None}}
    assert record.differing(a, b) == ["new.x", "old", "train.steps"]
    assert record.differing(a, a) == []


def test_source_digest_sees_code_but_not_comments_layout_or_docstrings(tmp_path: Path) -> None:
    def of(text: str) -> str:
        path = tmp_path / "plugin.py"
        path.write_text(text)
        return record.source_digest([path])

    plain = of("class A:\n    def f(self):\n        return 1\n")
    assert plain == of(
        '"""Doc."""\nclass A:  # why\n    """B."""\n\n    def f( self ):\n        return (1)\n'
    )
    assert plain != of("class A:\n    def f(self):\n        return 2\n")
    assert of("x = 'a'\n") != of("x = 'b'\n")


def test_source_digest_ignores_order_and_folder_but_not_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.py", "b.py", "other/a.py")]
    paths[2].parent.mkdir()
    for path, text in zip(paths, ("x = 1", "x = 2", "x = 1"), strict=True):
        path.write_text(text)
    a, b, moved = paths
    assert record.source_digest([a, b]) == record.source_digest([b, moved])
    assert record.source_digest([a]) != record.source_digest([b])
    b.write_text("x =")
    with pytest.raises(ConfigError, match=r"b\.py"):
        record.source_digest([b])
    with pytest.raises(ConfigError, match=r"gone\.py"):
        record.source_digest([tmp_path / "gone.py"])


# Writing.


def test_a_run_can_be_read_again(tmp_path: Path) -> None:
    with new(tmp_path / "runs") as run:
        run.append("start", stages=2, cost={"flops": 3})
        run.append("step", loss=math.nan, limits=(math.inf, -math.inf, 1.5))
        run.finish({"scores": DEFENDED})
    name = run.path.name
    assert name[8] == "T" and name.split("_")[0].endswith("Z") and "_zero-vs-none_" in name
    assert record.read_config(run.path) == CONFIG | {"digest": run.digest}
    assert run.digest == record.digest(CONFIG["identity"])
    start, step = record.read_events(run.path)
    assert start == {"type": "start", "stages": 2, "cost": {"flops": 3}}
    assert math.isnan(step["loss"]) and step["limits"] == [math.inf, -math.inf, 1.5]
    assert record.read_result(run.path) == {"scores": DEFENDED}
    raw = (run.path / record.EVENTS).read_text().splitlines()[1]
    assert raw.startswith('{"type": "step"') and '"nan"' in raw and "NaN" not in raw


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key != "type"),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_any_event_comes_back_as_it_was(fields: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as root, new(Path(root)) as run:
        run.append("step", **fields)
        assert record.read_events(run.path) == [{"type": "step", **fields}]


def test_array_scalars_are_stored_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with new(tmp_path) as run:
        run.append("eval", loss=numpy.float32(0.5), step=numpy.int64(3), nan=numpy.float32("nan"))
    (row,) = record.read_events(run.path)
    assert row["loss"] == 0.5 and row["step"] == 3 and math.isnan(row["nan"])


def test_a_field_cannot_take_the_place_of_the_type(tmp_path: Path) -> None:
    with new(tmp_path) as run, pytest.raises(ValueError, match="type"):
        run.append("step", type="end")


def test_each_row_is_out_at_once(tmp_path: Path) -> None:
    with new(tmp_path) as run:
        run.append("step", step=0)
        assert record.read_events(run.path) == [{"type": "step", "step": 0}]


def test_a_label_cannot_leave_the_root(tmp_path: Path) -> None:
    with new(tmp_path / "runs", label="../a b:c=1") as run:
        assert run.path.parent == tmp_path / "runs"
        assert "_..-a-b-c-1_" in run.path.name


def test_a_config_without_identity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="identity"):
        RunFolder.create(tmp_path, "x", {"cell": {}})
    assert not list(tmp_path.iterdir())


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        one, two = pool.map(create_many, [tmp_path, tmp_path])
    assert len({*one, *two}) == 100 == len(record.find_runs(tmp_path))


def test_a_name_that_is_taken_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter(["aaaaaa"] * 2 + ["bbbbbb"] * 2)
    monkeypatch.setattr(record.time, "strftime", lambda *_: "20260101T000000Z")
    monkeypatch.setattr(record, "write_atomically", lambda path, text: path.write_text(text))
    monkeypatch.setattr(record.secrets, "token_hex", lambda _: next(draws))
    with new(tmp_path) as first, new(tmp_path) as second:
        assert (first.path.name[-6:], second.path.name[-6:]) == ("aaaaaa", "bbbbbb")


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("needs /dev/full")
    with new(tmp_path) as run:
        run.close()
        run._events = device.open("ab", buffering=0)
        with pytest.raises(RunError, match=run.path.name) as caught:
            run.append("step", step=0)
    assert "no space left" in str(caught.value)


def test_a_row_that_was_cut_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    class Disk:
        """Takes five bytes of the second row, then is full once."""

        def __init__(self, file: object) -> None:
            self.file, self.room = file, 5

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if self.room == 0:
                self.room = 10**6
                full_disk()
            part = bytes(data[: self.room])
            self.room -= len(part)
            return self.file.write(part)

    with new(tmp_path) as run:
        run.append("start")
        run._events = Disk(run._events)
        with pytest.raises(RunError, match="no space left"):
            run.append("step", step=0)
        run.append("error", party="host", message="disk full")
    assert [row["type"] for row in record.read_events(run.path)] == ["start", "error"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_result_is_written_in_full_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    with new(tmp_path) as run:
        run.finish({"n": 1})
        before = sorted(run.path.iterdir())
        with monkeypatch.context() as patch:
            if function == "fsync":
                patch.setattr(record.os, "fsync", full_disk)
            else:
                patch.setattr(Path, "replace", full_disk)
            with pytest.raises(RunError, match=f"{run.path.name}.*result.json"):
                run.finish({"n": 2})
        assert sorted(run.path.iterdir()) == before
        assert record.read_result(run.path) == {"n": 1}
        run.finish({"n": 3, "loss": math.nan})
    assert record.read_result(run.path) == {"n": 3, "loss": "nan"}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        new(tmp_path / "file")


# A place to write to.


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    record.check_writable(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("below", ["file", "file/runs"])
def test_check_writable_refuses_a_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*choose another folder"):
        record.check_writable(tmp_path / below)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_check_writable_refuses_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"permission denied.*may write"):
        record.check_writable(tmp_path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "may write"), (errno.EACCES, "may write")],
)
def test_check_writable_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(record.os, "fsync", fail)
    with pytest.raises(ConfigError, match=remedy) as caught:
        record.check_writable(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


# Reading.


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_torn_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    with new(tmp_path) as run:
        run.append("start")
        run.append("step", step=0)
    path = run.path / record.EVENTS
    path.write_bytes(path.read_bytes()[:-1] if cut == 1 else path.read_bytes()[:-cut])
    expected = ["start", "step"] if cut == 1 else ["start"]  # only the newline is missing
    assert [row["type"] for row in record.read_events(run.path)] == expected


@pytest.mark.parametrize(
    "line",
    ["{", "", "[1]", '{"a": 1}', '{"type": 1}', '{"type": "step", "x": NaN}', "\0\0", "\xff"],
)
def test_a_corrupt_line_is_an_error_with_its_number(tmp_path: Path, line: str) -> None:
    with new(tmp_path) as run:
        run.append("start")
    with (run.path / record.EVENTS).open("ab") as file:
        file.write(line.encode("latin-1") + b'\n{"type": "end"}\n')
    with pytest.raises(RunError, match=r"events\.jsonl:2: not an event"):
        record.read_events(run.path)


def test_missing_and_empty_files_are_errors_in_one_line(tmp_path: Path) -> None:
    with new(tmp_path) as run:
        pass
    for message in ("is empty", "no complete event", "cannot be read"):
        with pytest.raises(RunError, match=message) as caught:
            record.read_events(run.path)
        assert record.EVENTS in str(caught.value) and "\n" not in str(caught.value)
        path = run.path / record.EVENTS
        if message == "is empty":
            path.write_text('{"type": "sta')
        else:
            path.unlink(missing_ok=True)
    for text in ("", "{", "[]", None):
        if text is None:
            (run.path / record.CONFIG).unlink()
        else:
            (run.path / record.CONFIG).write_text(text)
        with pytest.raises(RunError, match=r"config\.json"):
            record.read_config(run.path)
    assert record.read_result(run.path) is None
    (run.path / record.RESULT).write_text("{")
    with pytest.raises(RunError, match=r"result\.json"):
        record.read_result(run.path)


def test_a_config_whose_identity_was_changed_is_refused(tmp_path: Path) -> None:
    with new(tmp_path) as run:
        pass
    path = run.path / record.CONFIG
    config = json.loads(path.read_text())
    config["identity"]["train"]["steps"] = 4
    path.write_text(json.dumps(config))
    with pytest.raises(RunError, match="digest"):
        record.read_config(run.path)


def test_find_runs_and_find_finished(tmp_path: Path) -> None:
    assert record.find_runs(tmp_path / "none") == []
    (tmp_path / "not-a-run").mkdir()

    def add(name: str, steps: int, result: object) -> Path:
        with RunFolder.create(tmp_path, name, {"identity": {"steps": steps}}) as run:
            path = tmp_path / f"20260101T00000{len(record.find_runs(tmp_path))}Z_{name}"
            if result is not None:
                run.finish({"digest": run.digest, "scores": result})
        return run.path.rename(path)

    folders = [
        add("a", 1, DEFENDED),
        add("a", 1, {"outcome": "broken"}),
        add("b", 2, {"outcome": "invalid"}),
        add("c", 3, None),
        add("d", 4, DEFENDED),
    ]
    (folders[4] / record.RESULT).write_text("{")
    assert record.find_runs(tmp_path) == folders
    assert record.find_finished(tmp_path) == {record.digest({"steps": 1}): folders[1]}


# Provenance and cost of import.


def test_provenance_names_versions_but_no_host_user_or_path() -> None:
    found = record.provenance()
    assert found["packages"]["torch"] and found["packages"]["sentinel-bench"]
    assert set(found) == {"packages", "python", "platform", "processor", "cpus"}
    values = [str(v) for v in [*found.values(), *found["packages"].values()]]
    assert platform.node() not in values
    assert str(Path.cwd()) not in json.dumps(found)


def test_import_is_light() -> None:
    code = (
        "import sys, sentinel_bench.record, sentinel_bench.leaderboard, sentinel_bench.score\n"
        "heavy = {'torch', 'sklearn', 'numpy', 'pandas', 'pydantic', 'scipy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
