"""A small training run for ``gradwire demo``: a network learns handwritten digits on all ranks.

``gradwire demo`` starts ``python -m gradwire.demo`` as the ranks of a job. It uses PyTorch if that
is installed, and NumPy otherwise. Every rank trains on its share of each batch, so the result does
not depend on the number of ranks, except for rounding.
"""
