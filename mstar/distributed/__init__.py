"""Ranks of one lockstep group: which slice of a tensor each one holds, and layers cut along those slices.

It knows nothing of models, requests or how ranks are started; collectives move data between ranks of a
group only.
"""
