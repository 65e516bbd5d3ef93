"""Attention and cache kernels, each with an eager reference twin.

This folder shares its name with a package that transformers probes for at import. A version of "0"
makes transformers treat it as too old and go on, so keep this file free of imports.
"""

__version__ = "0"
