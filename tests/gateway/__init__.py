"""The gateway, alone: plain classes with property tests, and the whole of it against a fake decider."""
