"""Gone since Python 3.12."""
