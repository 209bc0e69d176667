"""Scripts that the tests of this folder run under a launcher; they import nothing of the tests."""
