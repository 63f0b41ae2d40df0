"""A captured decode step driven by one slot vector, and what it costs on one GPU.

`kernels` holds the small Triton kernels beside their torch references, `step` the device state by slot, the
host planner and the mailbox whose word the host polls, `check` rows that join and leave against an eager
reference, `loop` and `probes` the measurements, `python -m tools.bench.slot_decode` the run. It serves
nobody, schedules nothing and samples greedily only: it proves the shape that the engine has.
"""
