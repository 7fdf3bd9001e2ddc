"""Records, partitions and federations."""
