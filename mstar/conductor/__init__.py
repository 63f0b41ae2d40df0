"""Who serves what: the conductor's plain classes, which place requests on deciders and count what is live.

Soft state alone, rebuilt from the gateways that own the requests. No I/O, no clock, no torch.
"""
