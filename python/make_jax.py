"""Creates .venv-jax, the virtual environment for the tests of ``gradwire.jax``.

It has JAX and optax in the versions that the documentation names, on top of .venv-python. If they
can't be installed, that is said, and their tests are skipped.

    python3 python/make_jax.py
"""

from __future__ import annotations

from make_trainers import ROOT, environment, install

# Each with what it imports, without NumPy, which .venv-python has.
JAX = ["jax==0.10.2", "jaxlib==0.10.2", "ml_dtypes==0.6.0", "opt_einsum==3.4.0", "scipy==1.17.1"]
OPTAX = ["optax==0.2.8", "absl-py==2.5.1"]


def main() -> None:
    """Creates the environment, or brings it up to date."""
    python = environment(ROOT / ".venv-jax")
    install(python, "JAX", JAX)
    install(python, "optax", OPTAX)


if __name__ == "__main__":
    main()
