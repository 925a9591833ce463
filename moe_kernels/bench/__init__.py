"""`python -m moe_kernels bench`: suites of cases, timed beside PyTorch and whatever peers are installed."""
