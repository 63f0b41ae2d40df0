"""The rank: what decides a cell's steps (slots, ledger, scheduler, pipeline) and the actor that moves bytes.

Everything but the actor is a plain synchronous class fed with events: no torch, no clock, no I/O.
"""
