"""From predictions to files that QuPath opens."""
