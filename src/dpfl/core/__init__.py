"""Types, layout, randomness, linear algebra and errors: what every other room may use."""
