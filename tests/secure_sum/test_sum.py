"""The sum is exact, whoever drops out; what one member sends tells nothing without the others."""

import numpy as np
from hypothesis import given, settings, strategies as st
from tests.secure_sum.sums import make_sum


@settings(max_examples=15, deadline=None)
@given(data=st.data(), members=st.integers(2, 8), numbers=st.integers(1, 40))
def test_masked_equals_unmasked(data, members, numbers):
    colluders = data.draw(st.integers(0, max(0, members - 2)))
    most = members - ((members + colluders) // 2 + 1)
    dropouts = data.draw(st.integers(0, most))
    one = make_sum(members, dropouts=dropouts, colluders=colluders, numbers=numbers)
    gone = data.draw(st.sets(st.sampled_from(sorted(one.inputs)), max_size=dropouts))
    one.mask(*gone)
    expected = sum(one.inputs[name] for name in one.inputs if name not in gone)
    assert np.array_equal(one.unmask(), expected)


def test_sparse_graph():
    one, gone = make_sum(70, dropouts=3, numbers=3), ("m003", "m040", "m069")
    one.mask(*gone)
    assert 0 < len(one.announced["m000"].chosen) < 30
    expected = sum(one.inputs[name] for name in one.inputs if name not in gone)
    assert np.array_equal(one.unmask(), expected)
