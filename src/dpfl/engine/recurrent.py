"""Recurrent layers, unrolled so that per-record gradients follow from one backward.

At step t an LSTM (or plain recurrent layer) computes its gates from  W_ih x_t + b_ih + W_hh h_(t-1)
+ b_hh.  The gradient of a record with respect to W_ih is the sum over t of  d_t x_t^T, with d_t the
gradient of the gates: a dense layer whose positions are the steps; W_hh has h_(t-1) in the place of
x_t, and both biases have 1. In a GRU the reset gate stands between the two halves, so they have a
d_t each.

torch's own recurrent layers hide the gates. Here the layer is run step by step on the same
parameters, all steps' input halves in one product; records stay apart throughout.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.layer_rules import LayerGradient, Tap, learns, products, rows

State = tuple[Tensor, ...]


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, dim=1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=1), h.chunk(3, dim=1)
    reset = torch.sigmoid(xr + hr)
    update = torch.sigmoid(xz + hz)
    new = torch.tanh(xn + reset * hn)
    return ((1 - update) * new + update * state[0],)


_CELLS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda x, h, state: (torch.tanh(x + h),),
    "RNN_RELU": lambda x, h, state: (torch.relu(x + h),),
}
"""One step of each kind of layer: from both halves of the gates and the state to the next state."""


def can_unroll(layer: nn.Module) -> bool:
    """Whether :func:`unroll` can stand in for the layer."""
    return type(layer) in (nn.LSTM, nn.GRU, nn.RNN) and not layer.proj_size


def unroll(layer: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor | State, list[Tap]]:
    """Run the layer on ``x`` from a zero state.

    Returns its outputs, its last state, and a tap for every direction of every layer.
    """
    x = x if layer.batch_first else x.transpose(0, 1)
    taps = []
    last = []
    for number in range(layer.num_layers):
        sides = []
        for side in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            given = x.flip(1) if side else x
            outputs, state, tap = _one_direction(layer, given, f"_l{number}{side}")
            sides.append(outputs.flip(1) if side else outputs)
            last.append(state)
            taps.append(tap)
        x = sides[0] if len(sides) == 1 else torch.cat(sides, dim=2)
        if layer.dropout and number < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout, layer.training)
    states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    outputs = x if layer.batch_first else x.transpose(0, 1)
    return outputs, states if len(states) > 1 else states[0], taps


def _one_direction(layer: nn.RNNBase, x: Tensor, suffix: str) -> tuple[Tensor, State, Tap]:
    weight = getattr(layer, f"weight_ih{suffix}")
    recurrent = getattr(layer, f"weight_hh{suffix}")
    biases = [getattr(layer, f"bias_{half}{suffix}", None) for half in ("ih", "hh")]
    gates = F.linear(x, weight, biases[0])
    gates = gates if gates.requires_grad else gates.requires_grad_()
    # Zeros added to the other half of a GRU's gates: their gradient is the gradient of that half.
    extra = torch.zeros_like(gates, requires_grad=True) if layer.mode == "GRU" else None
    h = x.new_zeros(len(x), layer.hidden_size)
    state: State = (h, h) if layer.mode == "LSTM" else (h,)
    outputs = []
    for t, part in enumerate(gates.unbind(1)):
        half = F.linear(state[0], recurrent, biases[1])
        state = _CELLS[layer.mode](part, half if extra is None else half + extra[:, t], state)
        outputs.append(state[0])
    tap = Tap(
        partial(_rule, layer, suffix),
        [x.detach(), torch.stack([h, *outputs[:-1]], dim=1).detach()],
        [gates] if extra is None else [gates, extra],
    )
    return torch.stack(outputs, dim=1), state, tap


def _rule(
    layer: nn.RNNBase, suffix: str, x: Tensor, hidden: Tensor, *slopes: Tensor
) -> LayerGradient:
    """One direction of one layer: two dense layers whose positions are the steps.

    ``suffix`` ends the names of its parameters. ``slopes`` are the gradients of the gates: one
    where inputs and hidden states share them, else one for each.
    """
    halves = {"ih": (x, slopes[0]), "hh": (hidden, slopes[-1])}
    pieces = {}
    for half, (a, d) in halves.items():
        if learns(getattr(layer, weight := f"weight_{half}{suffix}")):
            pieces[weight] = products(a, d)
    for half, (_, d) in halves.items():
        if learns(getattr(layer, bias := f"bias_{half}{suffix}", None)):
            pieces[bias] = rows(d.sum(dim=1))
    return LayerGradient.of(**pieces)
