"""Models and losses that let records reach each other, or the weights, past a careless trial."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.phases import Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.data.inputs import Tokens
from dpfl.engine import Stacked
from dpfl.engine.base import Job
from dpfl.models import check_model
from dpfl.tasks import Classification, CustomTask


class Codebook(nn.Module):
    """Keeps a moving mean of its inputs in a parameter that is not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.top = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.data.mul_(0.999).add_(x.mean(0), alpha=0.001)
        return self.top(x + 0.1 * self.codes)


def test_a_model_that_writes_records_into_a_frozen_parameter_is_refused_and_left_as_it_was() -> (
    None
):
    model = Codebook()
    with pytest.raises(ConfigurationError, match="'codes': changes when the model is applied"):
        check_model(model, (4,), 2)
    assert torch.equal(model.codes, torch.zeros(4))


class Words(nn.Module):
    def __init__(self, largest: float | None = None, layer: float | None = None) -> None:
        super().__init__()
        self.words, self.top = nn.Embedding(9, 4, max_norm=layer), nn.Linear(4, 2)
        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        if self.largest is not None:
            return self.top(F.embedding(x, self.words.weight, max_norm=self.largest).mean(1))
        return self.top(self.words(x).mean(1))


def test_an_embedding_with_a_largest_norm_is_refused() -> None:
    """With a learning rate of 0 its update still says which tokens a client has."""
    check_model(Words(), (5,), 2, Tokens(9))
    with pytest.raises(ConfigurationError, match=r"'words': has a max_norm"):
        check_model(Words(layer=100.0), (5,), 2, Tokens(9))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_writes_to_its_weights_only_later_is_stopped_before_it_is_sent(
    frozen: bool,
) -> None:
    model = Words(largest=100.0)
    check_model(model, (5,), 2, Tokens(9))  # no row is that long yet
    if frozen:
        model.words.requires_grad_(False).weight.mul_(1e4)
    layout, phase = Layout.of_module(model), {"lr": 0.0, "clip": 1.0, "noise_multiplier": 1.0}
    job = Job(
        client="a",
        start=1e4 * layout.read(model),
        phases=(Phase(steps=1, batch_size=2, sampling="poisson", **phase),),
        features=torch.tensor([[0, 1, 2, 0, 1], [2, 1, 0, 2, 2]]),
        labels=torch.tensor([0, 1]),
        rng=SecretRng.simulated(PublicSeed(1)),
        inputs=Tokens(9),
        task=Classification(classes=2),
    )
    with pytest.raises(PrivacyRefusal, match="writes a record where it outlives its call"):
        Stacked().run(model, layout, [job])


class Centred(nn.Module):
    """Subtracts the mean of a batch, and hides it behind a last layer that starts small."""

    def __init__(self, size: float, *, always: bool) -> None:
        super().__init__()
        self.first, self.top, self.always = nn.Linear(4, 8), nn.Linear(8, 2), always
        with torch.no_grad():
            for own in self.top.parameters():
                own.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.top(z - z.mean(0) if self.always or self.training else z)


@pytest.mark.parametrize("size", [1.0, 1e-6, 0.0])
@pytest.mark.parametrize("always", [True, False])
def test_a_model_that_mixes_records_behind_a_small_last_layer_is_refused(
    size: float, always: bool
) -> None:
    with pytest.raises(ConfigurationError, match="other scores when another one is in the batch"):
        check_model(Centred(size, always=always), (4,), 2)


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    kept = torch.zeros_like(losses)
    kept[losses.detach().topk(min(8, len(losses))).indices] = 1
    return losses * kept


def small(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return 1e-6 * losses / losses.mean()


@pytest.mark.parametrize("loss", [hardest, small])
def test_a_loss_that_mixes_records_in_large_batches_or_little_is_refused(loss: object) -> None:
    with pytest.raises(ConfigurationError, match="another loss when others are there"):
        check_model(nn.Linear(4, 2), (4,), CustomTask(loss=loss, whole_targets=True))  # type: ignore[arg-type]


def test_small_outputs_and_losses_of_single_records_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e-6 * F.cross_entropy(outputs, targets, reduction="none")

    check_model(model, (4,), CustomTask(loss=loss, whole_targets=True))


class Memory(nn.Module):
    """Adds a slow moving mean of earlier batches, which is neither a parameter nor a buffer."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.top = nn.Linear(4, 2)
        self.mean: Tensor | None = None if late else torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        before = x.mean(0) if self.mean is None else self.mean
        self.mean = (0.9999 * before + 0.0001 * x.mean(0)).detach()
        return self.top(x + 0.01 * self.mean)


@pytest.mark.parametrize("late", [True, False])
def test_a_model_that_remembers_records_from_batch_to_batch_is_refused(late: bool) -> None:
    with pytest.raises(ConfigurationError, match="'mean': is another one with other records"):
        check_model(Memory(late=late), (4,), 2)


class Cached(nn.Module):
    """Keeps a table that depends on the length of records alone."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.table = nn.Linear(4, 2), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1]).float()
        return self.top(x + self.table)


def test_a_cache_that_depends_on_shapes_alone_passes() -> None:
    check_model(Cached(), (4,), 2)


class Experts(nn.Module):
    """Two experts with room for a third of a batch each, and for eight records at least."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(dim=1)
        chosen, room, found = chances.argmax(dim=1), max(8, len(x) // 3), torch.zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            place = (chosen == i).cumsum(0)
            kept = ((chosen == i) & (place <= room)).float()[:, None]
            found = found + kept * expert(x) * chances[:, i : i + 1]
        return found


def test_experts_that_turn_records_away_in_large_batches_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match="other scores when another one is in the batch"):
        check_model(Experts(), (4,), 2)
