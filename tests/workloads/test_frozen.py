"""What training must not change is as it was, or the trial fails, and no other one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dagsel.errors import WorkloadError
from dagsel.workloads import TorchWorkload
from dagsel.workloads.torch.frozen import BaseBuffer
from tests.workloads.test_base import (
    CONFIG,
    Body,
    adapted,
    arrays,
    trained,
    visit,
    whole,
    workload,
)


def thaw(model: Any, *_: Any) -> None:
    model[0].second.requires_grad_()


def write(model: Any, *_: Any) -> None:
    model[0].second.weight.data[3, 3] += 1e-3


@pytest.mark.parametrize("change", [thaw, write])
@pytest.mark.parametrize("with_base", [True, False])
def test_frozen_weights_that_training_changes_fail_the_trial_and_no_other(
    change: Callable[..., None], with_base: bool
) -> None:
    def train(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        if config.get("bad"):
            change(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            batches.log(loss)

    options: Any = {} if with_base else {"model": whole, "base": None, "state": "trainable"}
    it = workload(**options, train_fn=train)
    other = workload(**options, train_fn=train)
    good = trained(it, it.init(CONFIG, 0))
    expected = trained(it, it.init(CONFIG, 0), 4)
    assert trained(other, other.init(CONFIG, 0)) == good
    shard, bad = it.prepare(arrays()), {**CONFIG, "bad": True}
    with pytest.raises(WorkloadError, match=r"requires_grad=False.*such as '0\.second\.weight'"):
        it.train(it.init(bad, 0), shard, bad, visit=visit(1))
    # Its own copy of the base, and that of another search in this process, are loaded anew.
    assert it.train(good, shard, CONFIG, visit=visit(4)).state == expected
    assert trained(it, it.init(CONFIG, 0)) == good
    assert other.train(good, shard, CONFIG, visit=visit(4)).state == expected


def test_a_trial_that_is_kept_goes_on_after_another_has_changed_the_base() -> None:
    def model(config: Any, base: Any) -> nn.Module:
        made = adapted(config, base)
        if config.get("bad"):
            made.register_forward_hook(lambda module, *_: write(module))
        return made

    it, bad = workload(model), {**CONFIG, "bad": True}
    shard, expected = it.prepare(arrays()), trained(it, it.init(CONFIG, 0), 4)
    good = trained(it, it.init(CONFIG, 0), 3)
    with pytest.raises(WorkloadError, match="requires_grad=False"):
        it.train(it.init(bad, 0), shard, bad, visit=visit(1))
    assert it.train(good, shard, CONFIG, visit=visit(4)).state == expected


def test_frozen_weights_that_an_evaluation_changes_fail_the_trial() -> None:
    class Writes(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.second.weight.data.mul_(1.5)
            return super().forward(x)

    it = workload(base=Writes)
    with pytest.raises(WorkloadError, match=r"such as '0\.second\.weight'"):
        it.evaluate(it.init(CONFIG, 0), it.prepare(arrays()), CONFIG)


def test_a_buffer_of_the_base_that_an_evaluation_changes_is_not_trained_with() -> None:
    class Scores(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm.eval()  # its statistics stay those of the base
            hidden = super().forward(x)
            if not self.training:
                assert self.norm.running_mean is not None
                self.norm.running_mean.add_(1.0)
            return hidden

    it, shard = workload(base=Scores), workload().prepare(arrays())
    state = trained(it, it.init(CONFIG, 0), 1)
    expected = it.train(state, shard, CONFIG, visit=visit(2)).state
    again = trained(it, it.init(CONFIG, 0), 1)  # is kept, and scored
    it.evaluate(again, shard, CONFIG)
    assert it.train(again, shard, CONFIG, visit=visit(2)).state == expected


def test_a_factory_that_gives_other_frozen_weights_each_time_is_found() -> None:
    def drifting(config: Any) -> nn.Module:
        seeds.append(len(seeds))
        torch.manual_seed(len(seeds))
        return nn.Sequential(nn.Linear(6, 4).requires_grad_(requires_grad=False), nn.Linear(4, 3))

    seeds: list[int] = []
    it = workload(drifting, None, state="trainable")
    state = it.init(CONFIG, 0)
    with pytest.raises(WorkloadError, match="build the others the same each time"):
        it.train(state, it.prepare(arrays()), CONFIG, visit=visit(1))


def test_a_buffer_whose_rows_change_places_has_changed() -> None:
    order = torch.arange(6)
    for changed, is_changed in ((order.clone(), False), (order.roll(1), True)):
        assert BaseBuffer("order", changed, order).is_changed() == is_changed


@pytest.mark.parametrize(
    ("n_frozen", "state", "says"),
    [(2, None, True), (2, "trainable", False), (1, None, False), (0, None, False)],
)
def test_it_is_said_once_if_states_hold_what_is_frozen_of_a_large_model(
    n_frozen: int, state: Any, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def model(config: Any) -> nn.Module:
        made = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(3)))
        made[:n_frozen].requires_grad_(False)
        return made

    it = TorchWorkload(model, F.mse_loss, torch.optim.SGD, batch_size=8, state=state)
    for _ in range(2):
        it.validate({"lr": 0.1})
    found = [text for text in caplog.messages if "requires_grad=False" in text]
    assert len(found) == says
    assert not says or "32.0 MB of the model's 48.0 MB" in found[0]
