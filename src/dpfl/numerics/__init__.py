"""Pure functions on tensors, each with its reference: kernels that papers use and did not invent.

``clipping``          norms and clip factors in double precision, stacked products
``pursuit``           principal component pursuit (low rank plus sparse)
``noise_estimates``   how noisy each of a few long rows is
``tensor_svt``        thresholding singular values of a stack in Fourier space
``subspace``          top subspaces of a few long rows
``budget_split``      two groups of claimed budgets
``recursive_filter``  Laplacian smoothing, exactly periodic
``projections``       random projections that both ends make from one seed
``closed_form``       noise by published theorems, for comparison

Nothing here draws noise, knows a client or keeps state.
"""
