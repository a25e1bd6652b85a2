"""The test suite; a package so that helpers are imported by full name (`tests.house.rules`)."""
