"""Every numerical tolerance of the test suite, with the reason for its size.

Absolute bounds on values of order one unless a name says otherwise. A test that needs a looser bound has found a bug.
"""

FP32_ROUNDING = 2e-6
"""The same fp32 formula with sums in another order: a few ulp of values near one."""
FP32_GEMM = 1e-5
"""fp32 matrix products over some hundred terms of order one, compared between two libraries or two orders."""
FP32_RECURRENCE = 2e-5
"""fp32 linear attention carried over hundreds of tokens: chunked against token by token."""
FP32_DIFFERENCE = 2**-23
"""Of the larger of two fp32 sums that were added in different orders: what their difference is off by if each is
rounded once, to 24 bits."""
BF16_OUTPUT = 2**-8
"""Relative: half a bf16 ulp (8 significant bits), for fp32 results that are rounded to bf16 once."""
BF16_STEPS = 2**-6
"""Relative: an oracle that also rounds its inner steps to bf16, against one rounding at the end."""
PARITY_LOGPROB = 1e-4
"""Log-probabilities of the fp32 engine against transformers, in nats: the promise made to the user."""
BF16_OVER_ORACLE = 1.5
"""Median over rows of a bf16 run's largest error against fp32, over the same of the oracle's own bf16 run."""
BF16_ROWS_LOGPROB = 0.02
"""Median over rows of the largest change when KV rows alone are bf16 (8 bits), in nats, on tiny random models."""
FP8_ROWS_LOGPROB = 0.2
"""The same for E4M3 rows (4 bits of significand), per-tile scales."""
SCORE_TIE = 1e-5
"""Index scores of order one whose difference is fp32 rounding: which of the two is selected is not defined."""
