"""Claim: a step of 48 rows and its reply cross shared memory at least 20 times faster than asyncio pyzmq, 10
times at p99, codec included, when both ends are hot.

`python -m tools.bench.ipc` measures one way and round trip from 200 B to 1 MB, and the step, between two
processes under one kind of event loop: our ring spinning ("ring hot"), our ring with the doorbell only ("ring
bell"), asyncio streams over a Unix socket ("uds") and asyncio PUSH/PULL over ipc ("zmq"), in interleaved
rounds of the same run. How long threads of either process waited for a core is measured with every sample,
since on a busy machine that is most of a bad percentile.
"""
