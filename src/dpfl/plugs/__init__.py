"""The pipeline. One file a slot, in the order in which the slots act:

``selection`` who takes part; ``releases`` statistics before round one; ``local_work`` and
``sampling`` what a client does with its records; ``personal`` what stays at it; ``stages`` what it
does to its update before sending; ``channels``, ``secure_sum`` and ``over_the_air`` how uploads
reach the server; ``row_denoise`` cleaning rows against each other; ``weights``; ``central_noise``;
``denoise`` smoothing the aggregate; ``step`` moving the model.

Every slot holds a :class:`dpfl.plugs.base.Plug`. The same object acts on data and accounts for it.
"""
