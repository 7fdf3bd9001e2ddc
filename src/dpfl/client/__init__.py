"""What happens at a client: its local work, its samplers, its stages, and who it is."""
