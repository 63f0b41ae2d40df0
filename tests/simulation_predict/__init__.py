"""Costs, workloads and predictions of the simulator."""
