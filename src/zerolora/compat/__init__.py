"""Every place where another library is patched or its private parts are used: one file a library.

Each function here says why it is needed, which upstream thread it is about and for which versions it was written.
tests/unit/test_compat.py has a test for each that fails as soon as the library no longer needs it.
"""
