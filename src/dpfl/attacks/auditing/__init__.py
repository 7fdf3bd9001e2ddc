"""Lower bounds on epsilon, with confidence, beside what is claimed."""
