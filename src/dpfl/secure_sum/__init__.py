"""A secure sum: members add up integers, and a server learns nothing but the sum.

Bonawitz et al. 2017, *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, in the
variant for a server that may be malicious, with the sparse graph of Bell et al. 2020 where there
are many members. ``session`` says how many must be honest and how many may drop out,
``integers`` how wide the numbers are, ``keys`` what the primitives are, ``member`` and ``server``
what each side does in the five phases: keys, shares, masked input, signatures, unmasking.

Primitives are those of ``cryptography`` (X25519, Ed25519, HKDF, AES) and the secret sharing of
pycryptodome. Nothing here draws noise or knows of budgets.
"""
