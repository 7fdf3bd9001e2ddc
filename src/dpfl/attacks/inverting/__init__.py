"""Records reconstructed from what leaves a client."""
