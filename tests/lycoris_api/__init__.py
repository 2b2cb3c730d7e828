"""A suite written against the public name ``lycoris``; see conftest.py for the two targets it runs on."""
