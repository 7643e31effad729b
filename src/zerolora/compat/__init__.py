"""All patches and private uses of other libraries, one file for each library.

Each patch has its reason, upstream thread and tested versions. tests/unit/test_compat.py has a test for each that fails
when the library no longer needs it.
"""
