"""How what a forward saves is kept, offloaded or recomputed while a step runs."""
