"""Federated averaging in pfl's own simulator: local SGD, then the norm of each update clipped."""

from __future__ import annotations

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gate import Gate, spec
from bench.networks import flat, load, network
from bench.workloads import CHECK_RECORDS, check_data, read_data, workload

PACKAGES = ("torch", "pfl")


class Classifier(nn.Module):
    """The workload's network with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of a batch."""
        self.train()
        return F.cross_entropy(self.inner(features), labels)

    def metrics(self, features: Tensor, labels: Tensor) -> dict:
        """Report the loss; asked for in the first iteration only."""
        self.eval()
        with torch.no_grad():
            total = F.cross_entropy(self.inner(features), labels, reduction="sum").item()
        return {"loss": Weighted(total, len(labels))}


class Turns(TrainingProcessCallback):
    """Stops the clock after each central iteration and waits for the next turn."""

    def __init__(self, gate: Gate, iterations: int) -> None:
        self._gate, self._left = gate, iterations

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Wait for the first turn."""
        self._gate.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """End a turn."""
        self._gate.end_of_round()
        self._left -= 1
        if self._left > 0:
            self._gate.wait()
        return False, Metrics()


def run(
    model: Classifier,
    users: dict[str, list[Tensor]],
    *,
    iterations: int,
    epochs: int,
    batch_size: int,
    lr: float,
    bound: float,
    callbacks: list[TrainingProcessCallback],
    cohort: int | None = None,
) -> None:
    """Train in place."""
    sampler = get_user_sampler("minimize_reuse", list(users))
    data = FederatedDataset(lambda user: Dataset(users[user], user_id=user), sampler)
    clipping = CentrallyAppliedPrivacyMechanism(NormClippingOnly(order=2, clipping_bound=bound))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=iterations,
            evaluation_frequency=10**9,
            train_cohort_size=cohort or len(users),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[clipping]),
        model=PyTorchModel(
            model,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=epochs, local_learning_rate=lr, local_batch_size=batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=callbacks,
    )


def main() -> None:
    """Do what the specification asks."""
    gate, asked = Gate(), spec()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = workload(asked["workload"], asked["small"])
    model = Classifier(network(work))
    load(model, asked["start"])
    if asked["mode"] == "check":
        before = flat(model)
        features, labels = (torch.from_numpy(a) for a in check_data(asked["data"]))
        run(
            model,
            {"0": [features, labels]},
            iterations=1,
            epochs=asked["steps"],
            batch_size=CHECK_RECORDS,
            lr=work.lr,
            bound=asked["ball"],
            callbacks=[],
        )
        np.save(asked["update"], flat(model) - before)
    else:
        features, labels = (torch.from_numpy(a) for a in read_data(asked["data"]))
        assert work.epochs is not None
        assert work.ball is not None
        run(
            model,
            {str(i): [features[i], labels[i]] for i in range(work.clients)},
            iterations=asked["rounds"],
            epochs=work.epochs,
            batch_size=work.batch_sizes[0],
            lr=work.lr,
            bound=work.ball,
            callbacks=[Turns(gate, asked["rounds"])],
            cohort=work.cohort,
        )
    gate.done(PACKAGES)


if __name__ == "__main__":
    main()
