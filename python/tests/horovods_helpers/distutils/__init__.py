"""A replacement for distutils, which Python 3.12 removed."""
