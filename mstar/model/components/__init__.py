"""Layers that families are made of. They know shapes and slices, not checkpoints' names nor requests."""
