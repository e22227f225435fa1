"""Plugins in single files: which names they get, what is refused, what their identity covers."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sentinel_bench import plugins, registry
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError
from sentinel_bench.provenance import module_sources

ATTACK = """
from dataclasses import dataclass

from pydantic import Field

from sentinel_bench.api import Aggregator, Attack, Defense
from sentinel_bench.attacks.sign import Scaling
from sentinel_bench.config import Frozen


class DoubleParams(Frozen):
    factor: float = Field(2.0, description="times")


@dataclass
class Note:
    text: "str" = "needs the module to be known"


class Base(Attack[DoubleParams]):
    '''Has no name: no plugin.'''

    Params = DoubleParams


class Double(Base):
    '''Doubles.'''

    name = "double"
    goal = formula = source = "test"

    def signal(self, x, ctx):
        return x * self.params.factor


Alias = Double
"""
DEFENSE = """
from sentinel_bench.api import Aggregator, Defense, ResponseParams

class Watch(Defense[ResponseParams]):
    '''Watches.'''
    name = "watch"
    goal = formula = source = "test"
"""
RULE = """
from sentinel_bench.api import Aggregator, AggregatorParams

class First(Aggregator[AggregatorParams]):
    '''Takes the first.'''
    name = "first"
    goal = formula = source = "test"
"""
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    plugins.use(())


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file and returns its path."""

    def to(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return to


def known() -> list[str]:
    every = (registry.attacks, registry.defenses, registry.aggregators)
    return [name for reg in every for name in reg.names() if "/" in name]


def test_classes_with_a_name_are_plugins_called_by_file_and_name(write: Write) -> None:
    plugins.use([write("my.py", ATTACK + DEFENSE + RULE)])
    assert known() == ["my/double", "my/watch", "my/first"]
    attack = registry.attacks.create(Component.parse("my/double:factor=3"))
    assert attack.signal(2.0, None) == 6.0  # type: ignore[arg-type]
    assert registry.attacks.get("my/double").__module__ in sys.modules


def test_several_files_are_known_together_and_each_call_takes_the_place_of_the_last(
    write: Write,
) -> None:
    one, two = write("one.py", ATTACK), write("a/two.py", ATTACK)
    plugins.use([one, two, one])
    assert known() == ["one/double", "two/double"]
    assert [*plugins.in_use()] == [one, two]
    plugins.use([two])
    assert known() == ["two/double"]
    plugins.use(())
    assert (known(), plugins.in_use()) == ([], {})
    assert not [module for module in sys.modules if module.startswith(plugins.PREFIX)]


def test_a_plugin_of_a_file_acts_inside_of_another_attack(write: Write) -> None:
    plugins.use([write("my.py", ATTACK)])
    component = Component.parse("on-off:attack='my/double:factor=3'")
    wrapper = registry.attacks.create(component)
    assert type(wrapper.inner).__name__ == "Double"  # type: ignore[attr-defined]
    (inner,) = registry.attacks.identity(component)["wraps"]
    assert inner["name"] == "my/double"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("gone.py", None, r"gone.py: cannot be read: no such file"),
        ("folder.py", "", r"folder.py: is no file; install a package"),
        ("my.txt", ATTACK, r"my.txt: a plugin file is called NAME.py"),
        ("a b.py", ATTACK, r"a b.py: a plugin file is called NAME.py"),
        ("a:b.py", ATTACK, r"a:b.py: a plugin file is called NAME.py"),
        ("a.b.py", ATTACK, r"a.b.py: a plugin file is called NAME.py"),
        ("my.py", "", r"my.py: no plugin in it: a class that extends .* and has a `name`"),
        ("my.py", "# nothing\nx = 3\n", r"no plugin in it"),
        ("my.py", "from sentinel_bench.attacks.sign import Scaling\n", r"no plugin in it"),
        ("my.py", ATTACK.replace('name = "double"', ""), r"no plugin in it"),
        ("my.py", "def f(:\n", r"my.py:1: not Python: invalid syntax"),
        ("my.py", "x = 1\n\ty = 2\n", r"my.py:2: not Python: unexpected indent"),
        ("my.py", "\x00", r"my.py.*: not Python: .*null bytes"),
        ("my.py", "x = " + "(" * 500 + ")" * 500, r"my.py.*: not Python: "),
        ("my.py", "import nothing_of_this_name\n",
         r"my.py:1: cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_n"),
        ("my.py", "\n\nx = 1 / 0\n", r"my.py:3: cannot be imported: ZeroDivisionError: division"),
        ("my.py", "def f():\n    raise ValueError('no')\nf()\n", r"my.py:2: .*: ValueError: no"),
        ("my.py", "import sys\nsys.exit(0)\n", r"my.py:2: cannot be imported: SystemExit: 0"),
        ("my.py", "from . import helper\n", r"what lies beside it \(in a relative import\)"),
        ("my.py", "from .helper import x\n", r"beside it .*: make a package of it"),
        ("my.py", "def f():\n    import helper\n", r"imports what lies beside it \(helper\)"),
        ("my.py", "import helper.deep\n", r"imports what lies beside it \(helper\)"),
        ("my.py", "from parts.one import x\n", r"imports what lies beside it \(parts\)"),
        ("my.py", ATTACK + ATTACK.replace("class Double(", "class Other("),
         r"my.py: attack 'my/double' is there already, from .*my.py; rename the class or the file"),
        ("my.py", ATTACK.replace('"double"', '"a/b"'), r"my.py: 'a/b' is no name"),
        ("my.py", ATTACK.replace('"double"', '"a:b=3"'), r"my.py: 'a:b=3' is no name"),
        ("my.py", ATTACK.replace('"double"', "3"), r"my.py: 3 is no name"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_in_one_line_and_leaves_nothing(
    write: Write, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    write("helper.py", "x = 1\n")
    write("parts/one.py", "x = 1\n")
    good = write("good.py", ATTACK)
    if name == "folder.py":
        (tmp_path / name).mkdir()
    elif text is not None:
        write(name, text)
    with pytest.raises(ConfigError, match=message) as error:
        plugins.use([good, tmp_path / name])
    assert len(str(error.value).splitlines()) == 1
    assert (known(), plugins.in_use()) == ([], {})
    assert not [module for module in sys.modules if module.startswith(plugins.PREFIX)]


def test_what_is_beside_a_file_is_refused_also_where_python_would_find_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write("helper_of_mine.py", "x = 1\n")
    write("pile_of_mine/one.py", "x = 1\n")
    for line in ("import helper_of_mine", "from pile_of_mine.one import x"):
        with pytest.raises(ConfigError, match="imports what lies beside it"):
            plugins.use([write("my.py", f"{line}\n{ATTACK}")])


def test_what_is_installed_may_be_imported_whatever_lies_beside_the_file(write: Write) -> None:
    for name in ("json", "torch", "numpy"):  # what is beside is not what Python finds
        write(f"{name}.py", "raise RuntimeError\n")
    plugins.use([write("my.py", f"import json, numpy, torch\n{ATTACK}")])
    assert known() == ["my/double"]


def test_two_files_of_one_name_are_refused(write: Write) -> None:
    one, two = write("a/my.py", ATTACK), write("b/my.py", ATTACK.replace('"double"', '"other"'))
    with pytest.raises(ConfigError, match=r"another plugin file is called my\.py; rename one"):
        plugins.use([one, two])


def test_a_link_is_called_by_its_own_name(write: Write, tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to(write("my.py", ATTACK))
    plugins.use([tmp_path / "link.py"])
    assert known() == ["link/double"]
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "gone.py")
    with pytest.raises(ConfigError, match=r"nowhere\.py: cannot be read: no such file"):
        plugins.use([tmp_path / "nowhere.py"])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match=r"pipe\.py: is no file"):
        plugins.use([tmp_path / "pipe.py"])


def test_letters_of_any_script_make_a_name(write: Write) -> None:
    plugins.use([write("größe_攻撃-2.py", ATTACK)])
    assert known() == ["größe_攻撃-2/double"]
    assert Component.parse("größe_攻撃-2/double:factor=3").name == known()[0]


def test_what_a_file_prints_while_it_is_imported_is_no_data(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    plugins.use([write("my.py", f"print('hello')\n{ATTACK}")])
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def source(path: Path) -> str:
    plugins.use([path])
    found: str = registry.attacks.identity(Component(name="my/double"))["source"]
    return found


def test_the_identity_covers_the_code_of_the_file_and_of_built_in_plugins_it_uses(
    write: Write,
) -> None:
    first = source(write("my.py", ATTACK))
    assert source(write("my.py", ATTACK)) == first
    assert source(write("elsewhere/my.py", ATTACK)) == first
    assert source(write("my.py", f"# a comment\n{ATTACK}")) == first
    assert source(write("my.py", ATTACK.replace("Doubles.", "Makes two of one."))) == first
    assert source(write("my.py", ATTACK.replace("x *", "x +"))) != first
    covered = {path.name for path in module_sources(f"{plugins.PREFIX}my")}
    assert {"my.py", "sign.py"} <= covered
    assert "api.py" not in covered  # that is in the digest of the engine


def test_the_identity_is_that_of_the_code_that_runs_not_of_later_edits(write: Write) -> None:
    path = write("my.py", ATTACK)
    first = source(path)
    write("my.py", ATTACK.replace("x *", "x +"))
    assert registry.attacks.identity(Component(name="my/double"))["source"] == first
    path.unlink()
    assert registry.attacks.identity(Component(name="my/double"))["source"] == first


def test_another_process_runs_the_same_code_also_after_an_edit(write: Write) -> None:
    path = write("my.py", ATTACK)
    first = source(path)
    carried = pickle.loads(pickle.dumps(plugins.in_use()))
    plugins.use(())
    write("my.py", ATTACK.replace("x *", "x +"))
    plugins.use(carried)
    assert known() == ["my/double"]
    assert registry.attacks.identity(Component(name="my/double"))["source"] == first
    assert registry.attacks.create(Component(name="my/double")).signal(5.0, None) == 10.0  # type: ignore[arg-type]
    plugins.use([path])  # a new command
    assert source(path) != first


def test_an_edit_within_the_same_second_is_loaded(write: Write) -> None:
    path = write("my.py", ATTACK)
    stamp = path.stat().st_mtime
    first = source(path)
    write("my.py", ATTACK.replace("x *", "x +"))
    os.utime(path, (stamp, stamp))
    assert source(path) != first
    attack = registry.attacks.create(Component(name="my/double"))
    assert attack.signal(5.0, None) == 7.0  # type: ignore[arg-type]
    assert not [*path.parent.glob("__pycache__")]


def test_a_name_of_a_package_is_not_taken_over(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.attacks._targets, "my/double", "mine.plugin:Double")
    with pytest.raises(ConfigError, match=r"'my/double' is there already, from mine\.plugin"):
        plugins.use([write("my.py", ATTACK)])
    assert known() == ["my/double"]


def test_an_unknown_name_says_how_plugins_become_known(write: Write) -> None:
    plugins.use([write("my.py", ATTACK)])
    for name, message in (
        ("double", "unknown attack 'double'; did you mean my/double"),
        ("my/duoble", "unknown attack 'my/duoble'; did you mean my/double"),
        ("other/thing", "unknown attack 'other/thing'; nothing is known of 'other': install it, "
                        "or give --plugin other.py"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            registry.attacks.get(name)
        assert message in str(error.value)
