"""The pipeline. One file a slot, in the order in which the slots act:

``selection`` who takes part; ``releases`` statistics before round one; ``local_work`` and
``sampling`` what a client does with its records; ``personal`` what stays at it; ``stages`` and
``adaptive_clip`` what it does to its update before sending; ``channels`` and ``over_the_air`` how
uploads reach the server; ``denoise`` cleaning rows against each other, and smoothing the
aggregate; ``weights``; ``central_noise``; ``step`` moving the model.

Every slot holds a :class:`dpfl.plugs.base.Plug`. The same object acts on data and accounts for it.
"""
