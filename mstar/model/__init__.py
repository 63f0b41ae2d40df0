"""Models: from a name to something that turns tokens into logits.

`files` finds a model (registry name, local directory, GGUF file, hub id) and leaves a directory in Hugging
Face layout; `spec` reads its config.json; `tokenizer` turns text into ids and back; `weights` builds the
network from `components` as `families` declare it. This room knows nothing of requests, pages of a
scheduler, sampling or transport. `files`, `registry`, `pull`, `gguf`, `convert`, `spec`, `template` and
`tokenizer` import without torch.
"""
