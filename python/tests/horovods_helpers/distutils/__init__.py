"""A stand-in for distutils, which Python 3.12 has removed."""
