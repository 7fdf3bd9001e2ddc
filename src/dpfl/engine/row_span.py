"""Plain SGD on one linear layer of many clients, in the span of their records.

Every gradient of such a layer is a combination of the client's own records, so its weights stay W =
s W0 + A^T X: the start, a factor that only weight decay moves, and a coefficient for every record
and class. With the products K = X X^T of records, outputs are s X W0^T + K A, a step changes the
rows of A that are in its batch, and the distance from the start is read off A and K. A step then
costs records x records instead of records x features: much less for clients with few records. The
layer's bias is one more feature, of value 1.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dpfl.engine.base import Job
from dpfl.engine.phase_block import PhaseBlock
from dpfl.numerics.clipping import clip_factor, each_product, stacked_product

_MOST_NUMBERS = 1 << 24  # of all clients' records, which are laid out once


def fits_row_span(block: PhaseBlock) -> bool:
    """Whether a phase is plain SGD on one linear layer under cross-entropy, with few records beside
    its features.

    It must also look at every record twice or more: products of records are computed first. No
    record may be a blank.
    """
    first = block.first
    most = max(len(job.labels) for job in block.jobs)
    plain = block.chain.one_layer and block.task.softmax
    blanks = any(job.live is not None for job in block.jobs)
    if not plain or first.clip is not None or first.part != "all" or blanks:
        return False
    if block.momentum is not None or block.pull is not None:  # steps that depend on more than W
        return False
    features = block.chain.layers[0].in_features
    often = first.steps * first.batch_size
    few = 2 * most <= often and 4 * most <= features
    return few and len(block.jobs) * most * features <= _MOST_NUMBERS


def run_row_span(block: PhaseBlock, start: Tensor) -> Tensor | None:
    """Run a phase from the rows of ``start``; None if it does not fit.

    Neither does it where products of records are not finite.
    """
    span = _RowSpan(block, start) if fits_row_span(block) else None
    return span.run() if span and bool(torch.isfinite(span.products).all()) else None


def _products(job: Job, records: Tensor) -> Tensor:
    """X X^T of one client's records: worked out once, while they stay as they are."""
    if job.features.is_inference():  # torch does not count how often it was changed
        return stacked_product(records, records.T)
    version = job.inputs, job.features._version
    if job.memory.get("products", (None,))[0] != version:
        job.memory["products"] = version, stacked_product(records, records.T)
    return job.memory["products"][1]


class _RowSpan:
    """The state of one phase of all clients.

    In the words of the module: s is ``factor``, A is ``own`` (clients, records, classes), K A is
    ``moved``, K is ``products`` and X W0^T is ``at_start``.
    """

    def __init__(self, block: PhaseBlock, start: Tensor) -> None:
        self.block = block
        self.start = start
        weights, biases = block.chain.stacks(start)[0]
        inputs = (job.inputs(job.features).flatten(1) for job in block.jobs)
        self.records = [records.to(block.device) for records in inputs]
        labels = pad_sequence([job.labels for job in block.jobs], batch_first=True)
        clients, most = labels.shape
        self.products = start.new_zeros(clients, most, most)
        outputs = start.new_zeros(clients, weights.shape[1], most)
        counts = [len(records) for records in self.records]
        for job, records, count, room in zip(
            block.jobs, self.records, counts, self.products, strict=True
        ):
            room[:count, :count] = _products(job, records)
        # Twice as fast this way round.
        across = [records.T for records in self.records]
        rooms = [room[:, :count] for room, count in zip(outputs, counts, strict=True)]
        each_product(weights, across, rooms)
        self.at_start = outputs.transpose(1, 2).contiguous()
        if biases is not None:
            self.products += 1.0
            self.at_start += biases[:, None]
        one_hot = nn.functional.one_hot(labels.to(block.device), weights.shape[1])
        self.wanted = one_hot.to(torch.float32)
        self.factor = torch.ones(clients, 1, 1, device=block.device)
        self.start_norms = start.to(torch.float64).square().sum(dim=1)
        self.own, self.moved = torch.zeros_like(self.wanted), torch.zeros_like(self.wanted)

    def run(self) -> Tensor:
        """Take all steps, and return the clients' vectors."""
        block, (clients, most, classes) = self.block, self.wanted.shape
        keep = block.column([1 - p.weight_decay * p.lr for p in block.phases])[..., None]
        rows, rates = self._table()
        flat_products = self.products.reshape(clients * most, most)
        known = torch.cat([self.at_start, self.wanted], dim=2).view(clients * most, 2 * classes)
        for step, width in enumerate(block.sizes.max(axis=1)):
            flat = rows[step, :, :width].flatten()
            outputs = self.moved.view(clients * most, classes).index_select(0, flat)
            errors = self._errors(outputs, known.index_select(0, flat), width)
            errors.mul_(rates[step, :, :width])
            if block.decay is not None:
                self._shrink(keep)
                self.factor = self.factor * keep
            across = flat_products.index_select(0, flat).view(clients, width, most).transpose(1, 2)
            changes = errors.view(clients * width, classes)
            self.own.view(clients * most, classes).index_add_(0, flat, changes, alpha=-1.0)
            self.moved.baddbmm_(across, errors, alpha=-1.0)
            if block.balls is not None:
                self._into_balls(block.balls[:, 0])
        return self._vectors()

    def _table(self) -> tuple[Tensor, Tensor]:
        """Rows of the records and rates, (steps, clients, widest); no rate outside of a batch."""
        block, (clients, most, _) = self.block, self.wanted.shape
        sizes = torch.from_numpy(block.sizes)
        filled = torch.arange(int(sizes.max())) < sizes[..., None]
        chosen = torch.zeros(filled.shape, dtype=torch.int64)
        chosen.transpose(0, 1)[filled.transpose(0, 1)] = torch.cat([d.records for d in block.draws])
        each = torch.tensor([p.lr for p in block.phases]) / sizes.clamp_min(1)
        rates = (filled * each[..., None])[..., None]
        rows = chosen + torch.arange(clients)[:, None] * most
        return rows.to(block.device), rates.to(block.device)

    def _errors(self, outputs: Tensor, known: Tensor, width: int) -> Tensor:
        """Softmax of K A + s X W0^T, less the one-hot labels; in place."""
        clients, _, classes = self.wanted.shape
        known = known.view(clients, width, 2 * classes)
        outputs = outputs.view(clients, width, classes).addcmul_(self.factor, known[..., :classes])
        # Written out: three times as fast as torch's for few classes.
        outputs.sub_(outputs.amax(dim=2, keepdim=True)).exp_()
        return outputs.div_(outputs.sum(dim=2, keepdim=True)).sub_(known[..., classes:])

    def _shrink(self, factor: Tensor) -> None:
        """Multiply what was learned, A and K A."""
        self.own.mul_(factor)
        self.moved.mul_(factor)

    def _into_balls(self, radii: Tensor) -> None:
        """Move clients that have left their ball back to its border."""
        squares = (self.own * self.moved).sum(dim=(1, 2), dtype=torch.float64)
        if self.block.decay is not None:
            drift = (self.factor[:, 0, 0] - 1).to(torch.float64)
            crossed = (self.own * self.at_start).sum(dim=(1, 2), dtype=torch.float64)
            squares = squares + 2 * drift * crossed + drift.square() * self.start_norms
        distances = squares.clamp_min(0).sqrt()
        inside = clip_factor(distances, radii).to(torch.float32)[:, None, None]
        if bool((inside < 1).any()):
            self._shrink(inside)
            self.factor = 1 + inside * (self.factor - 1)

    def _vectors(self) -> Tensor:
        """The clients' vectors, s W0 + A^T X."""
        vectors = torch.empty_like(self.start)
        weights, biases = self.block.chain.stacks(vectors)[0]
        pairs = zip(self.own, self.records, strict=True)
        coefficients = [rows[: len(records)].T for rows, records in pairs]
        each_product(coefficients, self.records, weights)
        if biases is not None:
            biases.copy_(self.own.sum(dim=1))
        return vectors.addcmul_(self.factor[:, 0], self.start)
