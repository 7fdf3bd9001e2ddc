"""What every other package may use.

``types``      the nouns of a round: budgets, claims, terms, cohorts, rows, states
``phases``     local work as data: how records are clipped and noised, and how weights step
``errors``     every error that dpfl raises on purpose, each with its exit code
``checks``     refusals that constructors share, in one sentence each
``seeds``      public randomness, which may be printed, stored and sent
``random``     secret randomness, which has no serialiser, and the noise that is drawn from it
``grid``       the grid on which all noise is added, and what rounding onto it costs
``grid_noise`` the sampler: integers of round(N(0, S^2)) from a cipher
``layout``     named tensors as one flat vector, so that clipping it clips everything
``files``      where caches are; writing that a kill at any moment cannot spoil

``types``, ``phases``, ``errors``, ``checks``, ``seeds`` and ``grid`` are imported without torch.
"""
