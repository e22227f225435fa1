"""Plugins by name: built-in ones, and those of other packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sentinel_bench import registry
from sentinel_bench.aggregators import AGGREGATORS
from sentinel_bench.api import Attack, Defense, NoParams
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.attacks.wrap import Wrapper
from sentinel_bench.config import Component, Frozen
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.errors import ConfigError, PluginError

GOOD = """
from sentinel_bench.api import Attack, NoParams
from {package}.helper import FACTOR

class {name}(Attack[NoParams]):
    '''Doubles.'''
    name = "double"
    goal = formula = source = "test"
    def signal(self, x, ctx):
        return x * FACTOR
"""


BUILT_IN = [
    *(("attacks", name) for name in ATTACKS),
    *(("defenses", name) for name in DEFENSES),
    *(("aggregators", name) for name in AGGREGATORS),
]


@pytest.mark.parametrize("kind, name", BUILT_IN)
def test_every_built_in_name_is_the_name_of_its_class(kind: str, name: str) -> None:
    reg: registry.Registry[Any] = getattr(registry, kind)
    plugin = reg.get(name)
    assert plugin.name == name
    assert name in reg.names()
    assert (plugin.__doc__ or "").strip()
    for text in (plugin.goal, plugin.formula, plugin.source, plugin.version):
        assert text.strip()
    reg.create(Component(name=name))


@pytest.mark.parametrize(
    "reg, component, message",
    [
        (registry.attacks, "zeroes", "unknown attack 'zeroes'; did you mean zeros"),
        (registry.attacks, "qqqq", "unknown attack 'qqqq'; known: .*zeros"),
        (registry.defenses, "sentinal", "unknown defense 'sentinal'; did you mean sentinel"),
        (registry.attacks, "delay:step=3", "attack delay: unknown key 'step'; did you mean steps"),
        (registry.attacks, "delay:steps=0", "attack delay: steps: .*0"),
        (registry.attacks, "delay:steps=.nan", "attack delay: steps: .*nan"),
        (registry.defenses, "sentinel:lamda=3", "unknown key 'lamda'; did you mean lambda"),
        (registry.defenses, "sentinel:beta.act=3", "'beta.act'; known: activation, gradient"),
        (registry.defenses, "none:violations=x", "defense none: violations"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_parameter_is_told_with_the_nearest(
    reg: registry.Registry[Any], component: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reg.params(Component.parse(component))


class _Package:
    """The distribution of an entry point, as far as it matters."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., registry.Registry[Attack[Any]]]:
    """Return a function that makes packages with one entry point each, and a registry of them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**sources: str) -> registry.Registry[Attack[Any]]:
        points = []
        for package, source in sources.items():
            folder = tmp_path / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text("")
            (folder / "helper.py").write_text("FACTOR = 2\n")
            (folder / "plugin.py").write_text(source)
            for module in [m for m in sys.modules if m.partition(".")[0] == package]:
                monkeypatch.delitem(sys.modules, module)
            point = EntryPoint("double", f"{package}.plugin:Double", "sentinel_bench.attacks")
            vars(point)["dist"] = _Package(package)
            points.append(point)
        monkeypatch.setattr(
            registry, "entry_points", lambda group: EntryPoints(points).select(group=group)
        )
        return registry.Registry("attack", Attack, Frozen, ATTACKS, "sentinel_bench.attacks")

    return install


def good(package: str) -> str:
    return GOOD.format(package=package, name="Double")


def test_a_plugin_of_another_package_is_called_by_package_and_name(
    installed: Callable[..., Any],
) -> None:
    reg = installed(ours=good("ours"), theirs=good("theirs"))
    assert reg.names() == [*ATTACKS, "ours/double", "theirs/double"]
    assert reg.get("ours/double").__module__ == "ours.plugin"
    assert reg.get("theirs/double").__module__ == "theirs.plugin"
    assert reg.create(Component(name="ours/double")).signal(3, None) == 6
    assert reg.get("zeros") is registry.attacks.get("zeros")


def test_an_import_error_of_a_plugin_is_shown_when_it_is_used_and_hides_nothing_else(
    installed: Callable[..., Any],
) -> None:
    reg = installed(broken="import nothing_of_this_name\n", ours=good("ours"), empty="")
    assert "broken/double" in reg.names()
    with pytest.raises(PluginError, match=r"'broken/double' cannot be loaded: ModuleNotFoundError"):
        reg.get("broken/double")
    with pytest.raises(PluginError, match=r"'empty/double' cannot be loaded: AttributeError"):
        reg.get("empty/double")
    assert reg.get("ours/double")


def test_what_is_no_plugin_is_refused(
    installed: Callable[..., Any], plug: Callable[..., None]
) -> None:
    reg = installed(other="class Double: pass\n", thing="Double = 3\n")
    for name in ("other/double", "thing/double"):
        with pytest.raises(PluginError, match="is not a subclass of Attack"):
            reg.get(name)
    plug(Nameless, Unanswered)
    with pytest.raises(PluginError, match="'nameless' lacks formula, source"):
        registry.attacks.get("nameless")
    with pytest.raises(PluginError, match="Params must extend ResponseParams"):
        registry.defenses.get("unanswered")


class Nameless(Attack[NoParams]):
    name: ClassVar[str] = "nameless"
    goal = "test"


class Unanswered(Defense[Any]):
    name = "unanswered"
    goal = formula = source = "test"
    Params = NoParams


@pytest.mark.parametrize(
    "statement",
    [
        "from {package}.helper import FACTOR",
        "from .helper import FACTOR",
        "from . import helper",
        "import {package}.helper",
        "from {package} import helper",
    ],
)
def test_the_identity_of_a_plugin_depends_on_its_code_and_on_that_which_it_imports(
    installed: Callable[..., Any], tmp_path: Path, statement: str
) -> None:
    line = "from {package}.helper import FACTOR"
    source = GOOD.replace(line, statement).format(package="ours", name="Double")
    if "helper import" not in statement:
        source = source.replace("* FACTOR", "* 2")
    reg = installed(ours=source)
    component = Component(name="ours/double")
    first = reg.identity(component)
    assert first == reg.identity(component)
    (tmp_path / "ours" / "plugin.py").write_text(source.replace("Doubles", "Makes two of one"))
    assert reg.identity(component) == first
    (tmp_path / "ours" / "helper.py").write_text("FACTOR = 3\n")
    second = reg.identity(component)
    assert second["source"] != first["source"]
    (tmp_path / "ours" / "plugin.py").write_text(source.replace("x *", "x +"))
    assert reg.identity(component)["source"] not in (first["source"], second["source"])


def test_the_identity_of_a_plugin_holds_all_of_its_parameters() -> None:
    one = registry.attacks.identity(Component.parse("delay"))
    assert one["params"] == {"steps": 100}
    assert registry.attacks.identity(Component.parse("delay:steps=100")) == one
    assert registry.attacks.identity(Component.parse("delay:steps=101")) != one
    fences = registry.defenses.identity(Component(name="sentinel"))["params"]
    assert {"lambda", "violations", "quarantine", "seed", "statistics"} <= fences.keys()


# --- plugins that name other plugins --------------------------------------------------------------


def test_the_identity_of_a_wrapper_holds_those_of_what_it_wraps() -> None:
    inner = "delay:steps=3"
    identity = registry.attacks.identity(Component.parse(f"on-off:attack='{inner}',burst=2"))
    assert identity["wraps"] == [registry.attacks.identity(Component.parse(inner))]
    assert identity["params"] == {"attack": inner, "burst": 2, "period": 104}
    assert "wraps" not in registry.attacks.identity(Component.parse(inner))
    nested = registry.attacks.identity(Component.parse("on-off:attack='fence-rider:attack=delay'"))
    (rider,) = nested["wraps"]
    (delay,) = rider["wraps"]
    assert (rider["name"], delay) == (
        "fence-rider",
        registry.attacks.identity(Component.parse("delay")),
    )
    pool = registry.attacks.identity(Component.parse("mixed:pool=[zeros,'delay:steps=3',ones]"))
    assert [i["name"] for i in pool["wraps"]] == ["zeros", "delay", "ones"]


def test_another_attack_inside_is_another_identity() -> None:
    texts = [
        "on-off",
        "on-off:attack=ones",
        "on-off:attack='ones:value=2'",
        "on-off:attack='ones:value=3'",
        "on-off:attack='fence-rider:attack=ones'",
        "on-off:attack='fence-rider:attack=zeros'",
    ]
    identities = [registry.attacks.identity(Component.parse(text)) for text in texts]
    assert len({str(i) for i in identities}) == len(texts)
    assert registry.attacks.identity(Component.parse("on-off:attack=zeros")) == identities[0]


def test_the_identity_of_a_wrapper_depends_on_the_code_of_what_it_wraps(
    installed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reg = installed(ours=good("ours"))
    monkeypatch.setattr(registry, "attacks", reg)
    for text in (
        "on-off:attack=ours/double",
        "mixed:pool=[zeros,ours/double]",
        "on-off:attack='fence-rider:attack=ours/double'",
    ):
        (tmp_path / "ours" / "helper.py").write_text("FACTOR = 2\n")
        first = reg.identity(Component.parse(text))
        assert reg.identity(Component.parse(text)) == first
        (tmp_path / "ours" / "helper.py").write_text("FACTOR = 3\n")
        assert reg.identity(Component.parse(text)) != first


def test_a_plugin_of_another_package_acts_inside_of_a_wrapper(
    installed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reg = installed(ours=good("ours"))
    monkeypatch.setattr(registry, "attacks", reg)
    wrapper = reg.create(Component.parse("on-off:attack=ours/double"))
    assert isinstance(wrapper, Wrapper)
    assert wrapper.inner.__class__.__module__ == "ours.plugin"


class Pair(Attack[Any]):
    """Wraps what its parameters name, without checking it itself."""

    name: ClassVar[str] = "pair"
    goal = formula = source = "test"

    class Params(Frozen):
        inside: list[str] = []

    @classmethod
    def wraps(cls, params: Any) -> list[Component]:
        return [Component.parse(text) for text in params.inside]


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("zeroes", "unknown attack 'zeroes'; did you mean zeros"),
        ("delay:step=3", "attack delay: unknown key 'step'; did you mean steps"),
        ("delay:steps=0", "attack delay: steps: "),
        ("on-off:attack=zeroes", "unknown attack 'zeroes'"),
        ("pair:inside=[zeros,'delay:steps=0']", "attack delay: steps: "),
    ],
)
def test_what_a_plugin_wraps_is_checked_before_it_is_made(
    plug: Callable[..., None], inside: str, message: str
) -> None:
    plug(Pair)
    component = Component(name="pair", params={"inside": ["zeros", inside]})
    for method in (registry.attacks.params, registry.attacks.create, registry.attacks.identity):
        with pytest.raises(ConfigError) as error:
            method(component)
        assert message in str(error.value)
    assert registry.attacks.params(Component(name="pair", params={"inside": ["zeros"]}))


class Mute(Attack[NoParams]):
    """Cannot say what it wraps."""

    name: ClassVar[str] = "mute"
    goal = formula = source = "test"

    @classmethod
    def wraps(cls, params: Any) -> list[Component]:
        raise ValueError("no idea")


def test_a_plugin_that_cannot_say_what_it_wraps_is_at_fault(plug: Callable[..., None]) -> None:
    plug(Mute)
    with pytest.raises(PluginError):
        registry.attacks.params(Component(name="mute"))
