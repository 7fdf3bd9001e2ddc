"""The pipeline: one file a slot."""
