"""The graph: what a model is made of and in which order its parts run, as data and integer tables.

A model declares named walks over nodes (`nodes`), the order of its walks (`schedule`) and what of it may be
cut into chunks (`policy`). `rewrite` puts what is chunkable into a chunk Loop, `compile` turns the whole
declaration into integer tables once per worker, and `runtime` keeps the compact state of the requests that
walk over them. This room runs nothing, moves no bytes and reads no clock; it knows neither tensors nor
ranks, and names only appear in its messages.
"""
