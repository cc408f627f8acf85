"""The choice of what a stage keeps, offloads and recomputes."""
