"""What the project measures about itself, and the limits of these numbers."""
