"""What one dishonest client can do to the model, and to the others."""
