"""What every attack owes, tested on every attack of the registry."""

from __future__ import annotations

import math

import pytest
import torch

from sentinel_bench import registry
from sentinel_bench.api import (
    OWN,
    Attack,
    AttackContext,
    Knowledge,
    tier,
)
from sentinel_bench.config import Component
from sentinel_bench.contract._worker import SHAPES, Worker, create, same
from sentinel_bench.errors import ConfigError, KnowledgeError

NAMES = registry.attacks.names()
ACTIVE = [name for name in NAMES if name != "none"]
FINITE = [name for name in NAMES if registry.attacks.get(name).finite]
DTYPES = [torch.float32, torch.bfloat16]

every_name = pytest.mark.parametrize("name", NAMES)
every_active = pytest.mark.parametrize("name", ACTIVE)
every_finite = pytest.mark.parametrize("name", FINITE)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@every_active
@every_dtype
@every_shape
def test_an_attack_changes_something(name, dtype, shape):
    worker = Worker(name, shape=shape, dtype=dtype)
    for direction in worker.directions:
        honest = [worker.honest() for _ in range(5)]
        assert any(not torch.equal(worker.send(direction, x), x) for x in honest)


@every_name
@every_dtype
@every_shape
def test_an_attack_keeps_shape_dtype_and_device_and_stays_finite(name, dtype, shape):
    worker = Worker(name, shape=shape, dtype=dtype)
    finite = worker.attack.finite
    for sent in worker.run():
        assert (sent.shape, sent.dtype, sent.device.type) == (worker.shape, dtype, "cpu")
        assert sent.isfinite().all() or not finite


@every_finite
@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e-8])
def test_an_attack_stays_finite_on_a_constant_signal(name, value):
    worker = Worker(name)
    x = torch.full(worker.shape, value)
    assert all(worker.send(direction, x).isfinite().all() for direction in worker.directions)


@every_finite
@pytest.mark.parametrize("received", [0.0, 1.0])
def test_an_attack_stays_finite_where_everybody_is_alike(name, received):
    worker = Worker(name)
    worker.received = torch.full(worker.shape, received)
    worker.others = torch.ones(4, *worker.shape)
    x = torch.ones(worker.shape)
    for _ in range(3):
        assert all(worker.send(direction, x).isfinite().all() for direction in worker.directions)


@every_name
def test_an_attack_works_at_the_ends_of_the_pipeline_and_without_honest_company(name):
    worker = Worker(name)
    worker.received = None
    worker.others = torch.empty(0, *worker.shape)
    for sent in worker.run():
        assert sent.shape == worker.shape


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
    sent = worker.send(worker.directions[0], x)
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
    ],
)
def test_an_impossible_parameter_is_an_error(text):
    component = Component.parse(text)
    (key,) = component.params
    with pytest.raises(ConfigError, match=f"attack {component.name}: {key}: "):
        registry.attacks.create(component)
