"""The house without processes: real schedulers, executors and books under a virtual clock.

Channels delay, devices cost, ranks die and clients leave, all of it drawn from a seed, so that whatever
breaks an invariant breaks it again. The room decides nothing that the house decides, holds no tensor,
reads no real clock, and serves nobody.
"""
