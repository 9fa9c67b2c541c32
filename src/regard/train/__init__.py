"""Training: batches, schedules, checkpoints that survive, one loop for every model.

Knows no model: it takes callables and records.
"""
