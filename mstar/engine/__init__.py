"""Executes one StepPlan: validates it against this rank's own state, applies it, launches, samples.

The engine decides nothing about which rows run and knows nothing of text, HTTP or rings. Its
bookkeeping (SlotTable) is plain numpy; devices and the sampler are torch.
"""
