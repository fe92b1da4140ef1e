"""Parts of ``benchmarks/train.py``: the contenders, the processes that run them, the report."""
