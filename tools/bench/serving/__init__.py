"""Load for any OpenAI-compatible server, seen from the client: TTFT, ITL, gaps, tokens a second, errors.

It imports nothing of the engine, so that every server is measured by the same code, and runs in its own
process. It is not a correctness test: what the answers say is not looked at.

    python -m tools.bench.serving --url http://127.0.0.1:8000 --workload closed-8 --json out.json
"""
