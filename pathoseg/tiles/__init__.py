"""From slides and labels to seeded batches of tiles."""
