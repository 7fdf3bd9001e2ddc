"""Recurrent layers, unrolled so that per-record gradients follow from one backward.

At step t an LSTM (or plain recurrent layer) computes its gates from  W_ih x_t + b_ih + W_hh h_(t-1)
+ b_hh.  The gradient of a record with respect to W_ih is the sum over t of  d_t x_t^T, with d_t the
gradient of the gates: a dense layer whose positions are the steps; W_hh has h_(t-1) in the place of
x_t, and both biases have 1. In a GRU the reset gate stands between the two halves, so they have a
d_t each.

torch's own recurrent layers hide the gates. Here the layer is run step by step on the same
parameters, all steps' input halves in one product; records stay apart throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, ...]


@dataclass
class Tap:
    """One layer and direction: what went in, and the gates whose gradients are wanted (both halves
    the same, or two).
    """

    suffix: str
    inputs: Tensor
    hidden: Tensor
    gates: list[Tensor]


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, dim=1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=1), h.chunk(3, dim=1)
    reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    new = torch.tanh(xn + reset * hn)
    return ((1 - update) * new + update * state[0],)


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


Cell = Callable[[Tensor, Tensor, State], State]


def _cell(layer: nn.RNNBase) -> Cell:
    return {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}[layer.mode]


def unrollable(layer: nn.RNNBase) -> bool:
    """Whether the layer is one that :func:`unrolled` can stand in for."""
    return type(layer) in (nn.LSTM, nn.GRU, nn.RNN) and layer.proj_size == 0


def unrolled(layer: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor | State, list[Tap]]:
    """Run the layer on ``x`` from a zero state: its outputs, its last state, and a tap for every
    direction of every layer.
    """
    x = x if layer.batch_first else x.transpose(0, 1)
    cell, taps, last = _cell(layer), [], []
    for number in range(layer.num_layers):
        sides = []
        for side in range(2 if layer.bidirectional else 1):
            suffix = f"_l{number}" + ("_reverse" if side else "")
            outputs, state, tap = _one(layer, cell, x.flip(1) if side else x, suffix)
            sides.append(outputs.flip(1) if side else outputs)
            last.append(state)
            taps.append(tap)
        x = sides[0] if len(sides) == 1 else torch.cat(sides, dim=2)
        if layer.dropout and number < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout, layer.training)
    states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (
        x if layer.batch_first else x.transpose(0, 1),
        states if len(states) > 1 else states[0],
        taps,
    )


def _one(layer: nn.RNNBase, cell: Cell, x: Tensor, suffix: str) -> tuple[Tensor, State, Tap]:
    weight, recurrent = getattr(layer, f"weight_ih{suffix}"), getattr(layer, f"weight_hh{suffix}")
    bias = getattr(layer, f"bias_ih{suffix}", None)
    recurrent_bias = getattr(layer, f"bias_hh{suffix}", None)
    gates = F.linear(x, weight, bias)
    gates = gates if gates.requires_grad else gates.requires_grad_()
    # Zeros added to the other half of a GRU's gates: their gradient is the gradient of that half.
    extra = torch.zeros_like(gates, requires_grad=True) if cell is _gru else None
    h = x.new_zeros(len(x), layer.hidden_size)
    state: State = (h, h) if cell is _lstm else (h,)
    outputs, before = [], []
    for t, part in enumerate(gates.unbind(1)):
        before.append(state[0].detach())
        half = F.linear(state[0], recurrent, recurrent_bias)
        state = cell(part, half if extra is None else half + extra[:, t], state)
        outputs.append(state[0])
    hidden = torch.stack(before, dim=1)
    tap = Tap(suffix, x.detach(), hidden, [gates] if extra is None else [gates, extra])
    return torch.stack(outputs, dim=1), state, tap
