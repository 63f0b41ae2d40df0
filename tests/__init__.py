"""The test suite: it mirrors the packages; rules/ tests the house itself, e2e/ starts real processes."""
