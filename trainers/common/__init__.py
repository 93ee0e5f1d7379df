"""What the trainers share: readers, checkpoints, metrics, pictures."""
