"""What every attack owes, tested on every attack of the registry."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sentinel_bench import registry
from sentinel_bench.api import (
    OWN,
    Attack,
    AttackContext,
    Colluders,
    Judgement,
    Knowledge,
    Late,
    Message,
    Silence,
    UpdateContext,
    tier,
)
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError, KnowledgeError

NAMES = registry.attacks.names()
ACTIVE = [name for name in NAMES if name != "none"]
FINITE = [name for name in NAMES if registry.attacks.get(name).finite]
SHAPES = {"usual": (3, 4, 8), "batch 1": (1, 4, 8), "token 1": (3, 1, 8), "both 1": (1, 1, 8)}
DTYPES = [torch.float32, torch.bfloat16]
VOCABULARY = 20

every_name = pytest.mark.parametrize("name", NAMES)
every_active = pytest.mark.parametrize("name", ACTIVE)
every_finite = pytest.mark.parametrize("name", FINITE)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def create(name: str) -> Attack[Any]:
    """Make an attack; of those that deal, what one attacker was dealt."""
    component, _ = registry.attacks.get(name).deal(
        Component(name=name), "activation", np.random.default_rng(3)
    )
    return registry.attacks.create(component)


class Copy:
    """A private model of one embedding and one linear map, the map being the own stage."""

    vocabulary = VOCABULARY

    def __init__(self, weights: Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        self._embed = torch.randn(VOCABULARY, 4, generator=generator)
        self.parameters = [nn.Parameter(weights.detach().float().view(VOCABULARY, 4).clone())]

    def logits(self, ids: Tensor) -> Tensor:
        return self._embed[ids] @ self.parameters[0].T

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(index))
        return ids[:, :-1], ids[:, 1:]


class Permissive:
    """A detector that passes what is near to a signal, and asks nobody."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def judge(self, x: Tensor) -> Judgement:
        distance = float((x - self._x).float().abs().mean())
        return Judgement(distance > 1, {"distance": (distance, -1.0, 1.0)})


@dataclass
class Worker:
    """One malicious worker with as much past as its attack asks for, and a source of signals."""

    name: str
    seed: int = 3
    shape: tuple[int, ...] = SHAPES["usual"]
    dtype: torch.dtype = torch.float32
    attack: Attack[Any] = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.attack = create(self.name)
        self.generator = torch.Generator().manual_seed(self.seed)
        self._data = torch.Generator().manual_seed(17)
        self._age = dict.fromkeys(self.directions, -1)
        if self.directions == ("update",):
            self.shape = (VOCABULARY * 4,)
        self.history = {
            d: [self.honest() for _ in range(self.attack.memory())] for d in self.directions
        }
        self.received = self.honest()
        self.others = torch.stack([self.honest() for _ in range(4)])

    @property
    def directions(self) -> tuple[str, ...]:
        return ("update",) if self.attack.axis == "weights" else ("activation", "gradient")

    def honest(self) -> Tensor:
        x = torch.randn(self.shape, generator=self._data) * 2 + 0.5
        return x.to(self.dtype)

    def granted(self, x: Tensor) -> dict[Knowledge, Any]:
        every = {
            Knowledge.COLLUDERS: lambda: Colluders(
                torch.stack([x, x + 1]), 0, {}, torch.Generator().manual_seed(self.seed)
            ),
            Knowledge.HONEST: lambda: self.others.clone(),
            Knowledge.DETECTOR: lambda: Permissive(x.clone()),
            Knowledge.MODEL: lambda: Copy(x),
        }
        return {k: v for k, v in every.items() if k in self.attack.needs()}

    def send(self, direction: str, x: Tensor) -> Message:
        self._age[direction] += 1
        known = {
            "step": self._age[direction],
            "age": self._age[direction],
            "stage": 2,
            "replica": 1,
            "direction": direction,
            "received": self.received,
            "history": self.history[direction],
            "generator": self.generator,
            "name": self.name,
            "granted": self.granted(x),
        }
        if direction != "update":
            return self.attack.send(x, AttackContext(**known))
        context = UpdateContext(
            **(known | {"received": None}),
            targets=torch.arange(6).view(2, 3),
            vocabulary=VOCABULARY,
            relabel=lambda targets: torch.cos(x.float() + targets.sum()).to(x.dtype),
        )
        overrides = type(self.attack).update is not Attack.update
        return self.attack.update(x, context) if overrides else self.attack.inject(x, context)

    def run(self, steps: int = 3) -> list[Message]:
        """Return what is sent in some steps, all directions."""
        return [kept(self.send(d, self.honest())) for _ in range(steps) for d in self.directions]


def tensors(sent: Message) -> list[Tensor]:
    """What a receiver gets to see: at most one tensor."""
    if isinstance(sent, Silence):
        return []
    return [sent.signal if isinstance(sent, Late) else sent]


def seconds(sent: Message) -> float:
    return sent.seconds if isinstance(sent, Late) else 0.0


def kept(sent: Message) -> Message:
    """The same, safe from what is done to it later."""
    if isinstance(sent, Late):
        return Late(sent.signal.clone(), sent.seconds)
    return sent.clone() if isinstance(sent, Tensor) else sent


def same(one: list[Message], other: list[Message]) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return all(
        (type(a), seconds(a)) == (type(b), seconds(b))
        and all(
            torch.equal(s.nan_to_num(7.25), t.nan_to_num(7.25))
            for s, t in zip(tensors(a), tensors(b), strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


@every_active
@every_dtype
@every_shape
def test_an_attack_changes_something(name, dtype, shape):
    worker = Worker(name, shape=shape, dtype=dtype)
    for direction in worker.directions:
        honest = [worker.honest() for _ in range(5)]
        assert any(not same([worker.send(direction, x)], [x]) for x in honest)


@every_name
@every_dtype
@every_shape
def test_an_attack_keeps_shape_dtype_and_device_and_stays_finite(name, dtype, shape):
    worker = Worker(name, shape=shape, dtype=dtype)
    finite = worker.attack.finite
    for sent in worker.run():
        assert 0 <= seconds(sent) < math.inf
        for x in tensors(sent):
            assert (x.shape, x.dtype, x.device.type) == (worker.shape, dtype, "cpu")
            assert x.isfinite().all() or not finite


@every_finite
@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e-8])
def test_an_attack_stays_finite_on_a_constant_signal(name, value):
    worker = Worker(name)
    x = torch.full(worker.shape, value)
    assert stays_finite(worker, x)


@every_finite
@pytest.mark.parametrize("received", [0.0, 1.0])
def test_an_attack_stays_finite_where_everybody_is_alike(name, received):
    worker = Worker(name)
    worker.received = torch.full(worker.shape, received)
    worker.others = torch.ones(4, *worker.shape)
    x = torch.ones(worker.shape)
    for _ in range(3):
        assert stays_finite(worker, x)


def stays_finite(worker: Worker, x: Tensor) -> bool:
    sent = [worker.send(direction, x) for direction in worker.directions]
    return all(bool(y.isfinite().all()) for message in sent for y in tensors(message))


@every_name
def test_an_attack_works_at_the_ends_of_the_pipeline_and_without_honest_company(name):
    worker = Worker(name)
    worker.received = None
    worker.others = torch.empty(0, *worker.shape)
    for sent in worker.run():
        assert all(x.shape == worker.shape for x in tensors(sent))


@every_name
def test_only_a_fault_leaves_the_signal_out_or_sends_it_late(name):
    sent = Worker(name).run(6)
    assert any(not isinstance(s, Tensor) for s in sent) == registry.attacks.get(name).fault


@every_name
def test_an_attack_sees_what_it_declares_and_nothing_else(name):
    attack = create(name)
    assert attack.needs() >= attack.knowledge | OWN
    context = AttackContext(0, 0, 0, "activation", None, (), torch.Generator(), name=name)
    for what in Knowledge:
        if what is not Knowledge.OWN:
            with pytest.raises(KnowledgeError, match=f"attack {name} .*{what.value}.*{what.name}"):
                getattr(context, what.value)


@every_name
@every_dtype
def test_an_attack_leaves_its_input_its_past_and_what_it_received_alone(name, dtype):
    worker = Worker(name, dtype=dtype)
    for direction in worker.directions:
        x = worker.honest()
        given = [x, worker.received, *worker.history[direction]]
        before = [(t.clone(), t._version) for t in given]
        worker.send(direction, x)
        for tensor, (value, version) in zip(given, before, strict=True):
            assert torch.equal(tensor, value)
            assert tensor._version == version


@every_name
def test_an_attack_does_not_change_the_signal_through_what_it_sent(name):
    worker = Worker(name)
    x = worker.honest()
    value = x.clone()
    for sent in tensors(worker.send(worker.directions[0], x)):
        if sent is not x:
            sent.fill_(9)
            assert torch.equal(x, value)


@every_name
@every_dtype
def test_an_attack_is_the_same_run_for_the_same_seed(name, dtype):
    assert same(Worker(name, dtype=dtype).run(), Worker(name, dtype=dtype).run())


@every_name
def test_an_attack_does_not_touch_the_global_random_numbers(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Worker(name).run()
    assert torch.equal(torch.get_rng_state(), before)


@every_name
def test_an_attack_that_draws_sends_something_else_for_another_seed(name):
    worker = Worker(name)
    before = worker.generator.get_state()
    sent = worker.run()
    draws = not torch.equal(worker.generator.get_state(), before)
    shared = Knowledge.COLLUDERS in worker.attack.needs()
    assert same(sent, Worker(name, seed=4).run()) is not (draws or shared)


@every_name
def test_two_workers_of_one_attack_share_no_state(name):
    alone = Worker(name).run(6)
    one, other = Worker(name), Worker(name, seed=4)
    together = []
    for _ in range(6):
        together += one.run(1)
        other.run(1)
    assert same(alone, together)


@every_name
def test_an_attack_says_what_it_is(name):
    attack = registry.attacks.get(name)
    assert attack.name == name.rpartition("/")[2]
    for text in (attack.goal, attack.formula, attack.source, attack.version):
        assert text.strip()
    assert attack.__doc__ and attack.__doc__ != Attack.__doc__
    assert attack.note.strip() or not attack.fault
    assert all(isinstance(k, Knowledge) for k in attack.knowledge)
    assert tier(attack.knowledge)
    assert isinstance(create(name).memory(), int)


@every_name
def test_parameters_have_valid_defaults_and_descriptions(name):
    params = registry.attacks.params(Component(name=name))
    assert type(params) is registry.attacks.get(name).Params
    for key, info in type(params).model_fields.items():
        assert info.description, key
        value = getattr(params, key)
        assert not isinstance(value, float) or math.isfinite(value)
    again = Component(name=name, params=params.model_dump(mode="json", by_alias=True))
    assert registry.attacks.params(again) == params


@every_name
def test_an_unknown_parameter_is_an_error_that_names_the_nearest(name):
    known = list(registry.attacks.get(name).Params.model_fields)
    wrong = known[0] + known[0][-1] if known else "strength"
    with pytest.raises(ConfigError) as error:
        registry.attacks.create(Component(name=name, params={wrong: 1}))
    message = str(error.value)
    assert f"attack {name}" in message
    assert repr(wrong) in message
    assert not known or f"did you mean {known[0]}?" in message


def test_an_unknown_attack_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean .*random-sign"):
        registry.attacks.get("randomsign")


@pytest.mark.parametrize(
    "text",
    [
        "sign-flip:rate=0",
        "sign-flip:rate=1.1",
        "random-sign:p=0",
        "random-sign:p=1.01",
        "random-value:scale=0",
        "delay:steps=0",
        "delay:steps=1.5",
        "bias:sigma=0",
        "bias:kind=fixed",
        "invisible-noise:p=0.5",
        "invisible-noise:p=1",
        "invisible-noise:axis=batch",
        "scaling:alpha=.nan",
        "ones:value=.inf",
        "gaussian-noise:rate=0",
        "non-finite:p=0",
        "token-shift:by=0",
        "slow-drift:ramp=0",
        "mirror-surrogate:ridge=0",
        "mean-replay:window=0",
        "label-flip:shift=0",
        "alie:z=0",
        "on-off:burst=0",
        "on-off:period=1",
        "fence-rider:margin=0",
        "fence-rider:bisections=0",
        "mixed:pool=[]",
        "backdoor:w=0",
        "backdoor:trigger=[]",
        "crash:after=-1",
        "straggle:seconds=0",
        "straggle:seconds=.inf",
        "straggle:seconds=86401",
        "straggle:rate=0",
        "straggle:rate=1.1",
    ],
)
def test_an_impossible_parameter_is_an_error(text):
    component = Component.parse(text)
    (key,) = component.params
    with pytest.raises(ConfigError, match=f"attack {component.name}: {key}: "):
        registry.attacks.create(component)
