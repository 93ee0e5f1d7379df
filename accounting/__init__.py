"""What a private mechanism guarantees: sensitivity, zCDP, (epsilon, delta), statements."""
